"""A judge with an engine of its own: a fake one that counts, and vLLM, held to the rubric's schema."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.conf.errors import WorkerDied
from penstock.conf.model import FreshModelConfig
from penstock.conf.reward import JudgeConfig
from penstock.workers import judge_pool
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.judge_pool import JudgePool, JudgeSpec
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.protocols import Completion, Sampling
from penstock.workers.reward.reward_result import RewardError

TASK = json.dumps({"prompt": "2 + 2?", "answer": "4"})
Says = Callable[[str], str]


class FakeEngine:
    """Answers what `says` makes of the response that it is shown."""

    def __init__(self, tokenizer: Any, says: Says) -> None:
        self._tokenizer, self._says = tokenizer, says
        self.asked: list[tuple[str, Sampling]] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        text = self._tokenizer.decode(prompt_ids)
        self.asked.append((text, sampling))
        said = self._says(text.rpartition("<response>\n")[2].partition("\n</response>")[0])
        if said == "hang":
            await asyncio.sleep(1000)
        if said == "die":
            raise WorkerDied("the engine is gone")
        ids = self._tokenizer(said)["input_ids"]
        return [Completion(ids, [0.0] * len(ids), [0] * len(ids), said, "stop")]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("judge")
    fresh = FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1)
    build_fresh_model(path, fresh, seed=0)
    return str(path)


@pytest.fixture
def judged(model_path: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], FakeEngine]]:
    """The results of a call with some responses, by a judge that says what it is told to."""

    def call(responses: Sequence[str], says: Says, *, times: int = 1, **spec: Any) -> tuple[list[Any], FakeEngine]:
        engine = FakeEngine(load_tokenizer(model_path), says)
        monkeypatch.setattr(judge_pool, "make_engine", lambda *_, **__: engine)
        pool: JudgePool = JudgeSpec(model_path, **spec).make()

        async def scenario() -> list[Any]:
            await pool.start()
            try:
                for _ in range(times):
                    found = await pool.score(responses, [TASK] * len(responses))
                return found
            finally:
                await pool.close()

        return asyncio.run(scenario()), engine

    return call


def points(response: str) -> str:
    return json.dumps({"score": len(response)})


def test_points_become_rewards_and_nothing_is_asked_twice(judged: Any) -> None:
    rewards, engine = judged(["four!", "4", "four!"], points, times=2, options={"rubric": "Is it {answer}?"})
    assert rewards == [0.5, 0.1, 0.5]
    assert len(engine.asked) == 2
    for text, sampling in engine.asked:
        assert "Is it 4?" in text
        assert "2 + 2?" in text
        assert sampling.temperature == 0.0
        assert sampling.structure["json"]["required"] == ["score"]


def test_each_response_that_has_no_verdict_is_an_error_of_its_own(judged: Any) -> None:
    says = {"good": '{"score": 7}', "vague": "quite good", "wild": '{"score": 99}', "slow": "hang"}
    rewards, _ = judged([*says, "x" * 3000], lambda response: says[response], timeout_s=0.5)
    assert rewards[0] == 0.7
    assert all(isinstance(one, RewardError) for one in rewards[1:])
    assert [one.kind for one in rewards[1:]] == ["raised", "raised", "timeout", "raised"]
    for one, words in zip(
        rewards[1:],
        ("no number", "not from 0 to 10", "reward.timeout_s", "reward.judge.max_model_len=2048"),
        strict=True,
    ):
        assert words in one.text


def test_the_loss_of_its_engine_is_raised(judged: Any) -> None:
    with pytest.raises(WorkerDied, match="the engine is gone"):
        judged(["a", "b"], lambda response: "die" if response == "b" else "5")


@pytest.mark.real
def test_a_random_model_judges_within_the_range_when_it_is_held_to_the_schema(model_path: str) -> None:
    spec = JudgeSpec(
        model_path,
        JudgeConfig(max_model_len=1024, kv_cache_gib=0.1),
        {"low": 1, "high": 5, "max_tokens": 64},
        timeout_s=60,
    )

    async def scenario() -> tuple[list[Any], list[Any]]:
        pool = spec.make()
        await pool.start()
        try:
            responses = [f"It is {number}." for number in range(6)]
            first = await pool.score(responses, [TASK] * 6)
            pool.verdicts.clear()
            return first, await pool.score(responses[::-1], [TASK] * 6)
        finally:
            await pool.close()

    first, again = asyncio.run(scenario())
    assert all(isinstance(one, float) and 0 <= one <= 1 for one in first), first
    assert again == first[::-1]
