"""vLLM with drafted tokens: every token has the distribution, log-probability and version that it has without, across
weight updates, and an engine that drafts make slower begins again without them."""

import asyncio
from collections.abc import Callable, Coroutine
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig, SpeculationConfig
from penstock.conf.trainer import LoraConfig
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import Completion, EngineSpec, Publication, SampleCall, Sampling
from penstock.workers.rollout.engine_hf import sampling_logprobs
from penstock.workers.rollout.rollout_engines import make_engine
from penstock.workers.rollout.speculation import LEAST_DRAFTED
from tests.publications import write_publication

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
PROMPTS = [[20 + (place * step) % 30 for place in range(24)] for step in (1, 7)]
SAMPLING = Sampling(max_tokens=200, ignore_eos=True, temperature=0.7)
GROUP_SIZE, BINS = 32, 40
NUM_TOKENS, MANY_TOKENS = 30_000, 100_000
"""Tokens of each distribution that is tested, and in the soak."""
LEAST_P = 1e-5
"""Least p-value: where in the samples an update falls depends on the machine, so that every run is another draw."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes by the last token more than by those before, so that some drafts are right."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("repeating")
    fresh = FreshModelConfig(
        num_layers=2, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, initializer_range=0.15
    )
    build_fresh_model(path, fresh, seed=7)
    tensors = load_file(path / "model.safetensors")
    mixing = [name for name in tensors if "o_proj" in name or "down_proj" in name]
    save_file(tensors | {name: 0.2 * tensors[name] for name in mixing}, path / "model.safetensors", {"format": "pt"})
    return path


def judged_by(monkeypatch: pytest.MonkeyPatch, least_share: float) -> None:
    """Let drafts pay from this share on, whatever decode steps take on this machine."""
    monkeypatch.setattr("penstock.workers.rollout.speculation.break_even", lambda *_: least_share)


def p_value(counts: np.ndarray) -> float:
    """Probability of counts at least as uneven as these, by chi-square, where all are equally likely."""
    squares = ((counts - counts.mean()) ** 2).sum() / counts.mean()
    half = torch.tensor([(counts.size - 1) / 2, squares / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def moved(model: Any, seed: int, scale: float = 0.02) -> Any:
    other, generator = deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def published(root: Path, version: int, model: Any) -> Publication:
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return write_publication(root, version, weights.items())


def spec_of(path: Path, method: str, draft: str = "", **options: Any) -> EngineSpec:
    speculation = SpeculationConfig(method, num_tokens=3, max_sequences=2 * GROUP_SIZE)
    config = RolloutConfig(max_model_len=256, kv_cache_gib=0.1, speculation=speculation, **options)
    return EngineSpec(config, str(path), draft_path=draft, phase_timeout_s=60)


def with_engine(spec: EngineSpec, use: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    async def scenario() -> Any:
        engine = make_engine(spec)
        await engine.start()
        try:
            return await use(engine)
        finally:
            await engine.close()

    torch.set_num_threads(1)
    return asyncio.run(scenario())


@torch.no_grad()
def places_of(models: list[Any], prompt: list[int], completion: Completion, uniform: np.ndarray) -> np.ndarray:
    """Where each token lies in the distribution that it should be drawn from, from 0 to 1 by probability mass, and at
    random within its own: uniform numbers, if it was. `uniform`: one a token. Checks the log-probabilities."""
    ids, tokens = torch.tensor([[*prompt, *completion.token_ids]]), torch.tensor(completion.token_ids)[:, None]
    versions = torch.tensor(completion.versions)
    logprobs = torch.empty(len(tokens), models[0].config.vocab_size)
    for version in sorted(set(completion.versions)):
        logits = models[version](ids).logits[0, len(prompt) - 1 : -1]
        logprobs[versions == version] = sampling_logprobs(logits, SAMPLING)[versions == version]
    own = logprobs.gather(-1, tokens)[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), own, rtol=0, atol=1e-3)
    mass = logprobs.double().exp()
    below = mass.cumsum(-1).gather(-1, tokens)[:, 0] - mass.gather(-1, tokens)[:, 0]
    return (below + torch.from_numpy(uniform) * own.double().exp()).numpy()


async def sampled_across_updates(
    engine: Any, root: Path, models: list[Any], least_tokens: int
) -> list[tuple[list[int], Completion]]:
    """Enough samples, with an update in the middle of every other round."""
    found: list[tuple[list[int], Completion]] = []
    version, num_tokens, seed = 0, 0, 0
    while num_tokens < least_tokens:
        groups = [
            engine.generate(prompt, GROUP_SIZE, SAMPLING.seeded(seed + 100 * at)) for at, prompt in enumerate(PROMPTS)
        ]
        rounds, start, seed = asyncio.gather(*groups), engine.sampled().num_tokens, seed + 1000
        if version + 1 < len(models):
            while engine.sampled().num_tokens - start < 2 * GROUP_SIZE * 60:
                await asyncio.sleep(0.001)
            version += 1
            await engine.load(published(root, version, models[version]))
        for prompt, group in zip(PROMPTS, await rounds, strict=True):
            found += [(prompt, one) for one in group]
            num_tokens += sum(len(one.token_ids) for one in group)
    return found


@pytest.mark.parametrize(
    ("method", "num_tokens"),
    [
        ("draft", NUM_TOKENS),
        *(pytest.param(method, MANY_TOKENS, marks=pytest.mark.soak) for method in ("none", "ngram", "draft")),
    ],
)
def test_tokens_have_the_models_distribution_across_updates(
    method: str, num_tokens: int, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged_by(monkeypatch, 0.0)
    first = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    models = [first, *(moved(first, seed) for seed in (1, 2, 3))]
    draft = tmp_path / "draft"
    moved(first, 9, 0.01).save_pretrained(draft)
    for file in model_path.glob("token*"):
        (draft / file.name).write_bytes(file.read_bytes())

    async def use(engine: Any) -> Any:
        found = await sampled_across_updates(engine, tmp_path, models, num_tokens)
        return found, engine.sampled()

    found, progress = with_engine(spec_of(model_path, method, str(draft)), use)
    draws = np.random.default_rng(0)
    places = np.concatenate([places_of(models, prompt, one, draws.random(len(one.token_ids))) for prompt, one in found])
    counts, _ = np.histogram(places, BINS, (0, 1))
    assert len(places) >= num_tokens
    assert p_value(counts) > LEAST_P
    # two tokens in a row are independent, too: what is drawn after a rejected draft, say
    pairs, _, _ = np.histogram2d(places[:-1], places[1:], 8, ((0, 1), (0, 1)))
    assert p_value(pairs) > LEAST_P
    assert sum(len(set(one.versions)) > 1 for _, one in found) >= 2 * GROUP_SIZE
    if method == "none":
        assert progress.num_drafted == 0
    else:
        assert progress.num_drafted > num_tokens / 10
        assert 0.05 < progress.num_accepted / progress.num_drafted < 0.98


def test_samples_that_keep_their_cache_have_the_versions_of_both_sides(model_path: Path, tmp_path: Path) -> None:
    """Tokens drafted under old weights are checked under new ones, whose version they have."""
    first = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    async def use(engine: Any) -> list[Completion]:
        group = asyncio.create_task(engine.generate(PROMPTS[0], 8, SAMPLING.seeded(1)))
        start = engine.sampled().num_tokens
        while engine.sampled().num_tokens - start < 8 * 60:
            await asyncio.sleep(0.001)
        await engine.load(published(tmp_path, 1, moved(first, 1)))
        return list(await group)

    for completion in with_engine(spec_of(model_path, "ngram", on_update="keep"), use):
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {0, 1}
        assert len(completion.versions) == len(completion.token_ids) == len(completion.logprobs) == SAMPLING.max_tokens


def test_adapters_are_applied_to_drafted_tokens_and_prompts_are_scored_beside(model_path: Path) -> None:
    spec = spec_of(model_path, "ngram")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    adapter = LoraConfig(rank=4, alpha=12, publish="adapter")

    async def use(engine: Any) -> Any:
        call = SampleCall([*PROMPTS[0]], 1, Sampling(max_tokens=1, seed=0), prompt_logprobs=True)
        group, scored = await asyncio.gather(
            engine.generate(PROMPTS[0], 8, SAMPLING.seeded(1)), engine.sample(None, call)
        )
        return group, scored, engine.sampled()

    kind = EngineSpec(spec.config, spec.model_path, adapter=adapter, phase_timeout_s=60, is_probed=True)
    group, scored, progress = with_engine(kind, use)
    assert progress.num_accepted > 0
    for completion in group:  # before the first publication A and B are zeros
        places_of([model], PROMPTS[0], completion, np.zeros(len(completion.token_ids)))
    rows = model(torch.tensor([PROMPTS[0]])).logits[0, :-1].log_softmax(-1)
    own = rows.gather(-1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0].detach()
    torch.testing.assert_close(torch.tensor(scored.prompt_logprobs[1:]), own, rtol=0, atol=1e-3)


def test_an_engine_whose_drafts_are_rejected_begins_again_without_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are drawn from about ten that are equally likely: any two recur, and nothing follows from them."""
    judged_by(monkeypatch, 0.3)
    first = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    uniform = Sampling(max_tokens=180, ignore_eos=True, top_p=0.1, seed=1)

    async def use(engine: Any) -> Any:
        drafted = 0
        while drafted < LEAST_DRAFTED:
            await engine.generate(PROMPTS[0], 32, uniform)
            drafted = engine.sampled().num_drafted
        under_way = asyncio.create_task(engine.generate(PROMPTS[1], 4, uniform))
        await asyncio.sleep(0.05)
        loading = asyncio.create_task(engine.load(published(tmp_path, 1, moved(first, 1))))
        before = await under_way
        late = asyncio.create_task(engine.generate(PROMPTS[1], 4, uniform))
        await loading
        drafted = engine.sampled().num_drafted
        return before, await late, await engine.version(), engine.llm.vllm_config.speculative_config, drafted

    before, late, version, speculates, drafted = with_engine(spec_of(tiny_model, "ngram"), use)
    assert (version, speculates) == (1, None)
    assert drafted >= LEAST_DRAFTED
    assert {token_version for one in before for token_version in one.versions} == {0}
    assert {token_version for one in late for token_version in one.versions} == {1}
    assert [len(one.token_ids) for one in (*before, *late)] == [180] * 8


def test_a_requests_temperature_counts_for_each_of_its_drafted_tokens() -> None:
    from penstock.workers.rollout.vllm_drafts import repeat_for_tokens

    ends, output = torch.tensor([2, 2, 5]), torch.empty(5)
    repeat_for_tokens(output, torch.tensor([0.7, 0.3, 0.0]), ends, 0, 1)
    assert output.tolist() == pytest.approx([0.7, 0.7, 1.0, 1.0, 1.0])
