"""The fake keeps the contract, and its clock is the model of time it was given."""

import asyncio

import pytest

from penstock.conf.errors import WorkerDied
from penstock.workers.protocols import Completion, Publication, Sampling, SamplingProgress
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from tests.virtual_time import run_virtually

PROMPT = [1, 2, 3]


def generate(engine: ScriptedEngine, num_samples: int = 3, **sampling) -> list[Completion]:
    return asyncio.run(engine.generate(PROMPT, num_samples, Sampling(**{"max_tokens": 10, "seed": 4, **sampling})))


def test_every_token_has_a_logprob_and_a_version() -> None:
    for completion in generate(ScriptedEngine(version=7)):
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 10
        assert set(completion.versions) == {7}
        assert completion.finish_reason == "length"


def test_seeds_make_samples_reproducible_and_distinct() -> None:
    first = generate(ScriptedEngine(), 6)
    assert first == generate(ScriptedEngine(), 6)
    assert len({tuple(completion.token_ids) for completion in first}) == 6
    assert first[2].token_ids == generate(ScriptedEngine(), 1, seed=6)[0].token_ids


def test_greedy_ignores_the_seed() -> None:
    one, two = generate(ScriptedEngine(), 2, temperature=0.0)
    assert one.token_ids == two.token_ids


def test_lengths_come_from_the_length_function_up_to_max_tokens() -> None:
    engine = ScriptedEngine(length=lambda prompt, index: len(prompt) + 5 * index)
    lengths = [(len(c.token_ids), c.finish_reason) for c in generate(engine)]
    assert lengths == [(3, "stop"), (8, "stop"), (10, "length")]


def test_a_group_takes_as_long_as_its_longest_sample() -> None:
    engine = ScriptedEngine(TimeModel(latency_s=0.02, tokens_per_s=100), length=lambda _, index: 2 * (index + 1))

    async def timed() -> float:
        started = asyncio.get_running_loop().time()
        await engine.generate(PROMPT, 3, Sampling(max_tokens=10))
        return asyncio.get_running_loop().time() - started

    assert asyncio.run(timed()) >= 0.02 + 6 / 100


def test_tokens_count_while_their_sample_is_in_flight() -> None:
    engine = ScriptedEngine(TimeModel(latency_s=1.0, tokens_per_s=10), length=lambda _, index: 10 * (index + 1))

    async def watched() -> list[SamplingProgress]:
        group = asyncio.create_task(engine.generate(PROMPT, 2, Sampling(max_tokens=20)))
        seen = []
        for _ in range(5):
            await asyncio.sleep(0.75)
            seen.append(engine.sampled())
        await group
        return seen

    in_flight = [SamplingProgress(tokens, 2, tokens) for tokens in (0, 2 * 5, 10 + 12)]  # 10 tokens a second each
    assert run_virtually(watched()) == [*in_flight, SamplingProgress(30, 0), SamplingProgress(30, 0)]


def test_tokens_sampled_after_a_load_carry_the_new_version() -> None:
    engine = ScriptedEngine(TimeModel(tokens_per_s=100))

    async def load_in_flight() -> list[Completion]:
        group = asyncio.create_task(engine.generate(PROMPT, 2, Sampling(max_tokens=20)))
        await asyncio.sleep(0.1)
        await engine.load(Publication("", 1))
        return await group

    for completion in asyncio.run(load_in_flight()):
        assert completion.versions == sorted(completion.versions)
        assert set(completion.versions) == {0, 1}


def test_a_closed_engine_says_so() -> None:
    engine = ScriptedEngine()
    asyncio.run(engine.close())
    with pytest.raises(WorkerDied, match="closed"):
        generate(engine)
