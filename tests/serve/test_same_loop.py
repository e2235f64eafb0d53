"""One loop, over the verbs alone, in a session and on a server. Each is held against itself: a server's adapter, its
whole model and a session's weights differ in their bits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.conf.errors import DataError
from penstock.orchestrator.loops.verbs import LoopPolicy
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import SampledTokens
from tests.orchestrator.conftest import SMALL_MODEL
from tests.serve.served import KEY, served

pytestmark = pytest.mark.real
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
GROUP, NUM_STEPS = 32, 6
SAMPLING = penstock.Sampling(max_tokens=6)


@dataclass
class Seen:
    rewards: list[float]
    before: list[np.ndarray]
    """Log-probabilities of some data at the start, `[T]` each."""
    saved: list[np.ndarray]
    """The same when the state was saved."""
    after: list[list[np.ndarray]]
    """The same, after a further step and after the state was loaded."""
    again: list[list[int]]
    """Samples of the loaded weights by a seed, then those of the saved ones."""


def reward(tokens: list[int]) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def datum(prompt: list[int], sample: SampledTokens, advantage: float) -> penstock.Datum:
    before, length = len(prompt) - 1, len(sample.token_ids)
    padded = [0.0] * before
    return penstock.Datum(
        np.array([*prompt, *sample.token_ids[:-1]], np.int32),
        np.array([0] * before + sample.token_ids, np.int64),
        {
            "logprobs": np.array(padded + sample.logprobs, np.float32),
            "advantages": np.array(padded + [advantage] * length, np.float32),
        },
    )


def step(policy: LoopPolicy, rate: float) -> tuple[float, list[penstock.Datum]]:
    """Sample groups, and step by importance sampling. Returns the mean reward, and the data."""
    futures = [policy.sample_async(prompt, GROUP, SAMPLING) for prompt in PROMPTS]
    data, rewards = [], []
    for prompt, future in zip(PROMPTS, futures, strict=True):
        group = future.result(timeout=300).samples
        scores = [reward(one.token_ids) for one in group]
        rewards += scores
        data += [datum(prompt, one, score - float(np.mean(scores))) for one, score in zip(group, scores, strict=True)]
    output = policy.forward_backward(data, "importance_sampling")
    assert [values.shape for values in output.logprobs] == [one.targets.shape for one in data]
    assert policy.optim_step(penstock.AdamParams(learning_rate=rate))["actor/grad_norm"] > 0
    policy.publish()
    return float(np.mean(rewards)), data


def loop(policy: LoopPolicy, rate: float) -> Seen:
    """A loop that knows nothing of where it runs."""
    fixed = [datum([1, 2, 3], SampledTokens([4, 5, 6], [0.0] * 3, "length"), 1.0)]

    def scores() -> list[np.ndarray]:
        output = policy.forward(fixed, penstock.LossCall("importance_sampling"))
        assert output.metrics["loss"] < 0
        return output.logprobs

    def drawn() -> list[int]:
        return policy.sample([1, 2, 3], 1, penstock.Sampling(max_tokens=8, seed=3)).samples[0].token_ids

    before = scores()
    rewards = [step(policy, rate)[0] for _ in range(NUM_STEPS)]
    path, saved, first = policy.save("kept"), scores(), drawn()
    with pytest.raises(DataError, match="is there already"):
        policy.save("kept")
    step(policy, 30 * rate)
    further = scores()
    policy.load(path)
    policy.publish()
    return Seen(rewards, before, saved, [further, scores()], [drawn(), first])


def check(seen: Seen) -> None:
    assert np.mean(seen.rewards[-2:]) > np.mean(seen.rewards[:2]) + 0.1
    further, loaded = seen.after
    assert not np.array_equal(seen.before[0], seen.saved[0])
    assert not np.array_equal(further[0], seen.saved[0])
    assert np.array_equal(loaded[0], seen.saved[0])
    assert seen.again[0] == seen.again[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build_fresh_model(folder / "model", SMALL_MODEL, seed=3)
    return str(folder / "model")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_loop_runs_in_a_session(small_run: list[str], tmp_path: Path, cluster: str, num_ranks: int) -> None:
    words = [*small_run, "rollout.engine=hf", f"output_dir={tmp_path}", "name=own", f"trainer.num_ranks={num_ranks}"]
    with penstock.session(penstock.load_config(words)) as run:
        check(loop(run.policy, 6e-3))
        run.policy.forward_backward(step(run.policy, 1e-3)[1][:1], "importance_sampling")
        with pytest.raises(DataError, match="Call optim_step"):
            run.policy.save("other")
        assert (tmp_path / "own" / "states" / "kept" / "state.json").is_file()


@pytest.mark.parametrize(
    ("trained", "rate"),
    [
        pytest.param("serve.max_rank=8", 1e-2, marks=pytest.mark.promise("Loops of your own")),
        ("serve.full=true", 6e-3),
    ],
)
def test_the_loop_runs_on_a_server(
    model: str, warm_python: list[str], ray_address: str, tmp_path: Path, trained: str, rate: float
) -> None:
    words = [f"model.path={model}", "rollout.engine=hf", "rollout.max_model_len=64", trained]
    with served(tmp_path, words, warm_python, ray_address) as server, penstock.Client(server.url, KEY, rank=8) as run:
        check(loop(run.policy, rate))
        with pytest.raises(DataError, match="min_p"):
            run.policy.sample([1], 1, penstock.Sampling(min_p=0.5))
        with pytest.raises(DataError, match="1000000"):
            run.policy.forward([penstock.Datum(np.array([10**6]), np.array([1]))], "cross_entropy")
