"""The pull loop: everything leased is written once, as much at a time as the engine takes, and failures are named."""

import asyncio
import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.algorithms.graph.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, STANDARD_COLUMNS
from penstock.conf.errors import DataError, DeadlineExceeded, EngineFailure, PromptRefused, WorkerDied, WorkerFailed
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.spec import StageSpec, StoreSpec
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_worker import GroupIntake, RolloutWorker, sample_seed

GROUP_SIZE = 3


def make_store(**changes: Any) -> Store:
    columns = (*PROMPT_COLUMNS, *ROLLOUT_COLUMNS)
    options: dict[str, Any] = {
        "columns": tuple(STANDARD_COLUMNS[name] for name in columns),
        "source_columns": PROMPT_COLUMNS,
        "stages": (
            StageSpec("rollout", "group", ("prompt_ids",), ROLLOUT_COLUMNS),
            StageSpec("train", "batch", ("prompt_ids", *ROLLOUT_COLUMNS), ()),
        ),
        "group_size": GROUP_SIZE,
        "groups_per_step": 4,
        "max_active_groups": 4,
        "max_staleness": 0,
        **changes,
    }
    return Store(StoreSpec(**options))


def make_worker(
    engine: Any, *, max_samples: int = 12, dropped: frozenset[str] = frozenset(), **options: Any
) -> RolloutWorker:
    intake = GroupIntake("Rollout-0", Sampling(max_tokens=5), 17, GROUP_SIZE, max_samples, dropped=dropped)
    return RolloutWorker(engine, intake, **options)


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt_ids": [10 + index, 20], "task": "{}"} for index in range(count)]


async def run_until_written(worker: RolloutWorker, client: StoreClient, num_groups: int = 4) -> Any:
    """The batch that the worker's samples form; the worker ends because the store is closed."""
    running = asyncio.create_task(worker.run(client))
    await client.put_groups(prompts(num_groups))
    batch = await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 10)
    await client.close("the test is over")
    await asyncio.wait_for(running, 10)
    assert batch is not None
    return batch.rows


class CountingEngine(ScriptedEngine):
    """Counts how many groups are in it at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.now = self.most = 0

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().generate(prompt_ids, num_samples, sampling)
        finally:
            self.now -= 1


def test_what_the_engine_sampled_is_what_the_store_gets() -> None:
    async def scenario() -> None:
        client = StoreClient(make_store())
        rows = await run_until_written(make_worker(ScriptedEngine(version=0)), client)
        assert len(rows) == 4 * GROUP_SIZE
        for group_id, positions in rows.groups():
            prompt = rows.arrays("prompt_ids")[positions[0]].tolist()
            sampling = Sampling(max_tokens=5, seed=sample_seed(17, group_id))
            expected = await ScriptedEngine().generate(prompt, GROUP_SIZE, sampling)
            for position, completion in zip(positions, expected, strict=True):
                assert rows.arrays("response_ids")[position].tolist() == completion.token_ids
                assert rows.arrays("token_versions")[position].tolist() == completion.versions
                assert rows.arrays("behavior_logprobs")[position].tolist() == pytest.approx(completion.logprobs)
                assert rows.strings("response_text")[position] == completion.text
                assert rows.strings("finish_reason")[position] == "length"

    asyncio.run(scenario())


def test_the_greedy_stage_gets_one_text_for_all_samples_of_a_group() -> None:
    async def scenario() -> None:
        greedy = StageSpec("greedy_rollout", "group", ("prompt_ids",), ("greedy_text",))
        train = StageSpec("train", "batch", ("prompt_ids", "greedy_text"), ())
        columns = tuple(STANDARD_COLUMNS[name] for name in (*PROMPT_COLUMNS, "greedy_text"))
        client = StoreClient(make_store(stages=(greedy, train), columns=columns))
        rows = await run_until_written(make_worker(ScriptedEngine(version=0), greedy=True), client)
        for _, positions in rows.groups():
            prompt = rows.arrays("prompt_ids")[positions[0]].tolist()
            (expected,) = await ScriptedEngine().generate(prompt, 1, Sampling(max_tokens=5).greedy())
            assert {rows.strings("greedy_text")[position] for position in positions} == {expected.text}

    asyncio.run(scenario())


def test_a_group_whose_task_is_cancelled_by_what_it_calls_is_not_lost_silently() -> None:
    class Leaking(ScriptedEngine):
        async def generate(self, *_: Any) -> list[Completion]:
            raise asyncio.CancelledError

    async def scenario() -> None:
        client = StoreClient(make_store())
        running = asyncio.create_task(make_worker(Leaking()).run(client))
        await client.put_groups(prompts(1))
        with pytest.raises(WorkerFailed, match=r"Rollout-0: the task of group \d+ was cancelled"):
            await asyncio.wait_for(running, 30)

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_samples", "most"), [(12, 4), (6, 2), (8, 2), (1, 1)])
def test_as_many_groups_run_at_a_time_as_fit(max_samples: int, most: int) -> None:
    async def scenario() -> None:
        client = StoreClient(make_store())
        engine = CountingEngine(TimeModel(tokens_per_s=200))
        await run_until_written(make_worker(engine, max_samples=max_samples), client)
        assert engine.most == most

    asyncio.run(scenario())


def test_counters_tell_samples_tokens_and_busy_time() -> None:
    async def scenario() -> None:
        client = StoreClient(make_store())
        worker = make_worker(ScriptedEngine(TimeModel(tokens_per_s=100)))
        assert worker.stats()["busy_s"] == 0
        await run_until_written(worker, client)
        stats = worker.stats()
        assert (stats["samples"], stats["tokens"], stats["groups"]) == (12, 60, 4)
        assert stats["busy_s"] >= 0.05

    asyncio.run(scenario())


def test_responses_that_were_cut_are_dropped_where_the_run_wants_it() -> None:
    class Cutting(ScriptedEngine):
        async def generate(self, *arguments: Any) -> list[Completion]:
            found = await super().generate(*arguments)
            return [
                replace(found[0], finish_reason="length"),
                *(replace(one, finish_reason="stop") for one in found[1:]),
            ]

    async def scenario() -> dict[str, Any]:
        client = StoreClient(make_store())
        rows = await run_until_written(make_worker(Cutting(), dropped=frozenset({"length"})), client)
        assert set(rows.strings("finish_reason")) == {"stop"}
        return await client.stats()

    assert asyncio.run(scenario())["dropped/truncated_by_length"] == 4


class Broken(ScriptedEngine):
    """Gives NaN for the second token of the first sample of some prompts."""

    prompts: Container[int] = (10,)
    weights: Sequence[str] = ()

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        first, *others = await super().generate(prompt_ids, num_samples, sampling)
        if prompt_ids[0] in self.prompts:
            first = replace(first, logprobs=[first.logprobs[0], math.nan, *first.logprobs[2:]])
        return [first, *others]

    async def nonfinite_weights(self) -> list[str]:
        return [*self.weights]


@pytest.mark.parametrize("weights", [(), ("model.norm.weight",)])
def test_a_sample_without_a_logprob_is_dropped_and_told_with_its_origin(weights: tuple[str, ...]) -> None:
    async def scenario() -> tuple[dict[str, float], list[str]]:
        client, engine = StoreClient(make_store()), Broken(version=3)
        engine.weights = weights
        running = asyncio.create_task(make_worker(engine).run(client))
        await client.put_groups(prompts(4))
        assert await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 10) is not None
        found = await client.stats(), (await client.describe())["last_drops"]
        await client.close("the test is over")
        await running
        return found

    stats, drops = asyncio.run(scenario())
    assert stats["dropped/bad_logprobs"] == 1
    (told,) = [line for line in drops if "bad_logprobs" in line]
    assert "Rollout-0: the log-probability of token 2 of 5 is nan, at version 3, after a prompt of " in told
    assert "tokens (10" in told
    if weights:
        assert "1 of its weights are not finite: model.norm.weight." in told
    else:
        assert "Its weights are all finite: the cause is in what the engine computes." in told


def test_too_many_samples_without_logprobs_end_the_run() -> None:
    async def scenario() -> None:
        client, engine = StoreClient(make_store(groups_per_step=64, max_active_groups=64)), Broken()
        engine.prompts = range(1000)
        await client.put_groups(prompts(64))
        with pytest.raises(EngineFailure, match=r"2\d of the last \d+ samples failed, .* Rollout-0: the log-prob.*nan"):
            await asyncio.wait_for(make_worker(engine).run(client), 60)

    asyncio.run(scenario())


def test_empty_responses_are_dropped_and_counted() -> None:
    async def scenario() -> dict[str, float]:
        client = StoreClient(make_store())
        engine = ScriptedEngine(length=lambda prompt, index: 0 if prompt[0] == 10 else 5)
        running = asyncio.create_task(make_worker(engine).run(client))
        await client.put_groups(prompts(5))
        assert await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 10) is not None
        stats = await client.stats()
        await client.close("the test is over")
        await running
        return stats

    assert asyncio.run(scenario())["dropped/empty_response"] == GROUP_SIZE


@pytest.mark.parametrize(("error", "reason"), [(PromptRefused, "invalid_prompt"), (DataError, "refused_request")])
def test_what_the_engine_refuses_is_dropped_with_the_reason(error: type[DataError], reason: str) -> None:
    class Refusing(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
            if prompt_ids[0] == 10:
                raise error("a prompt of 9999 tokens leaves no room")
            return await super().generate(prompt_ids, num_samples, sampling)

    async def scenario() -> None:
        client = StoreClient(make_store())
        running = asyncio.create_task(make_worker(Refusing()).run(client))
        await client.put_groups(prompts(5))
        assert await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 10) is not None
        assert (await client.stats())[f"dropped/{reason}"] == GROUP_SIZE
        assert any("9999 tokens" in line for line in (await client.describe())["last_drops"])
        await client.close("the test is over")
        await running

    asyncio.run(scenario())


def test_a_dead_engine_ends_the_loop_with_its_error() -> None:
    async def scenario() -> None:
        client = StoreClient(make_store())
        engine = ScriptedEngine()
        await engine.close()
        await client.put_groups(prompts(4))
        with pytest.raises(WorkerDied, match="closed"):
            await asyncio.wait_for(make_worker(engine).run(client), 10)

    asyncio.run(scenario())


def test_a_group_that_takes_too_long_names_the_key() -> None:
    async def scenario() -> None:
        client = StoreClient(make_store())
        worker = make_worker(ScriptedEngine(TimeModel(latency_s=60)), timeout_s=0.05)
        await client.put_groups(prompts(4))
        with pytest.raises(DeadlineExceeded, match=r"Rollout-0: group \d .* rollout\.generate_timeout_s"):
            await asyncio.wait_for(worker.run(client), 10)

    asyncio.run(scenario())


def test_leases_of_long_groups_are_renewed() -> None:
    async def scenario() -> None:
        client = StoreClient(make_store(lease_timeout_s=0.5))
        worker = make_worker(ScriptedEngine(TimeModel(latency_s=0.8)))
        await run_until_written(worker, client)
        assert worker.stats()["late_groups"] == 0

    asyncio.run(scenario())


def test_a_result_that_comes_after_its_lease_is_discarded_and_counted() -> None:
    async def scenario() -> None:
        store = make_store()
        client = StoreClient(store)
        worker = make_worker(ScriptedEngine(TimeModel(latency_s=0.3)))
        running = asyncio.create_task(worker.run(client))
        await client.put_groups(prompts(4))
        await asyncio.sleep(0.1)
        for lease in list(store.ledger.residents.leases.held):  # as if its heart had missed its beats
            await store.release(lease)
        assert await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 10) is not None
        await client.close("the test is over")
        await running
        assert worker.stats()["groups"] + worker.stats()["late_groups"] >= 4

    asyncio.run(scenario())


def test_the_loop_ends_when_the_store_closes_with_nothing_to_do() -> None:
    async def scenario() -> None:
        client = StoreClient(make_store())
        running = asyncio.create_task(make_worker(ScriptedEngine()).run(client))
        await asyncio.sleep(0.01)
        await client.close("the test is over")
        await asyncio.wait_for(running, 5)

    asyncio.run(scenario())


def test_seeds_depend_on_run_and_group_alone() -> None:
    seeds = {sample_seed(run, group) for run in range(20) for group in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**48 for seed in seeds)
    assert sample_seed(1, 2) == sample_seed(1, 2)


class SeeingEngine(ScriptedEngine):
    """Notes the pictures that it is shown, by the first token of the prompt."""

    def __init__(self) -> None:
        super().__init__(TimeModel())
        self.shown: dict[int, PromptPictures | None] = {}

    async def generate(
        self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling, pictures: PromptPictures | None = None
    ) -> list[Completion]:
        self.shown[prompt_ids[0]] = pictures
        return await super().generate(prompt_ids, num_samples, sampling)


def test_an_engine_is_shown_the_pictures_of_each_prompt_and_none_of_a_text() -> None:
    engine, seen = SeeingEngine(), ("pictures", "picture_ranges")

    async def scenario() -> None:
        await engine.start()
        columns = (*PROMPT_COLUMNS, *seen, *ROLLOUT_COLUMNS)
        store = make_store(
            columns=tuple(STANDARD_COLUMNS[name] for name in columns),
            source_columns=(*PROMPT_COLUMNS, *seen),
            stages=(
                StageSpec("rollout", "group", ("prompt_ids", *seen), ROLLOUT_COLUMNS),
                StageSpec("train", "batch", ("prompt_ids", *ROLLOUT_COLUMNS), ()),
            ),
        )
        client = StoreClient(store)
        running = asyncio.create_task(make_worker(engine).run(client))
        pictures = ([b"one", b"another"], [], [b"one"], [])
        ranges = ([0, 2, 5, 3], [], [1, 2], [])
        rows = zip(prompts(4), pictures, ranges, strict=True)
        await client.put_groups([{**row, "pictures": shown, "picture_ranges": at} for row, shown, at in rows])
        await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 60)
        await client.close("the test is over")
        await asyncio.wait_for(running, 60)

    asyncio.run(scenario())
    one = PromptPictures((b"one",), ((1, 2),))
    assert engine.shown == {10: PromptPictures((b"one", b"another"), ((0, 2), (5, 3))), 11: None, 12: one, 13: None}
