"""An engine that is measured does what it did; its tokens are seen while they are sampled. And what an engine is asked
when numbers of threads are tried."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.metering.meters import Meters
from penstock.workers.protocols import Completion, Publication, RolloutEngine, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_engines import (
    MOST_SAMPLES,
    NUM_TOKENS,
    NUM_TRIES,
    EngineMeter,
    seconds_per_token,
)
from tests.metering.measured import measured
from tests.virtual_time import run_virtually


def test_tokens_and_sequences_are_seen_while_they_are_sampled() -> None:
    async def scenario() -> None:
        meters = Meters()
        engine = ScriptedEngine(TimeModel(tokens_per_s=10))
        meter = EngineMeter(engine, meters)
        meter.start()

        async def generate() -> list[Completion]:
            with meter.sampling(3):
                return await engine.generate([1, 2], 3, Sampling(max_tokens=50))

        group = asyncio.create_task(generate())
        await asyncio.sleep(2.5)
        half = measured(meters)
        assert half["rollout_tokens_total"] == 3 * 20, "as of two seconds, when it was looked at last"
        assert half["rollout_samples_total"] == 0
        assert (half["rollout_running_sequences"], half["rollout_waiting_sequences"]) == (3, 0)
        completions = await group
        await asyncio.sleep(1.5)
        whole = measured(meters)
        assert [len(completion.token_ids) for completion in completions] == [50] * 3
        assert whole["rollout_tokens_total"] == 150
        assert whole["rollout_samples_total"] == 3
        assert whole["rollout_running_sequences"] == 0
        await meter.close()

    run_virtually(scenario())


def test_a_load_is_measured_and_one_that_fails_is_not() -> None:
    async def scenario() -> None:
        meters, engine = Meters(), ScriptedEngine()
        meter = EngineMeter(engine, meters)
        with meter.loading():
            await engine.load(Publication("", 3))
        await engine.close()
        with pytest.raises(Exception, match="closed"), meter.loading():
            await engine.load(Publication("", 4))
        assert measured(meters)["rollout_weight_load_seconds_count"] == 1

    asyncio.run(scenario())


def test_work_that_was_given_up_takes_nothing_back() -> None:
    meters, engine = Meters(), SimpleNamespace()
    meter = EngineMeter(cast(RolloutEngine, engine), meters)
    for num_tokens in (10, 4, 9):
        sampled = SimpleNamespace(num_tokens=num_tokens, num_in_flight=5, num_waiting=2)
        engine.sampled = lambda sampled=sampled: sampled
        meter.note()
    found = measured(meters)
    assert found["rollout_tokens_total"] == 10 + 0 + 5
    assert (found["rollout_running_sequences"], found["rollout_waiting_sequences"]) == (3, 2)


class PlayedEngine:
    """A group takes 8 virtual seconds on one thread, and 8 / n on n; they are decoded together."""

    def __init__(self) -> None:
        self.num_threads, self.calls = 0, 0
        self.policies = set[str]()

    async def use_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        self.calls += 1
        self.policies.add(sampling.policy)
        await asyncio.sleep(8 / self.num_threads)
        tokens = [0] * sampling.max_tokens
        return [Completion(tokens, [0.0] * len(tokens), [0] * len(tokens), "", "length")] * num_samples


@pytest.mark.parametrize(("num_groups", "together"), [(4, 4), (1, 1), (0, 1), (1000, MOST_SAMPLES // 8)])
def test_a_token_takes_its_share_of_the_time_of_those_that_are_decoded_together(num_groups: int, together: int) -> None:
    engine = PlayedEngine()
    found = run_virtually(seconds_per_token(engine, [1, 2], num_groups, 8, None, "solver"))
    assert engine.policies == {"solver"}
    assert engine.calls == 2 * NUM_TRIES * together
    assert found[1] == pytest.approx(2 * found[2])
    assert found[2] * together * 8 * NUM_TOKENS == pytest.approx(4)
