"""A source that takes another's place goes on exactly after what the store has: whatever was drawn or put meanwhile,
the groups are those of one source that nobody disturbed."""

import asyncio
import json
import multiprocessing
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from penstock.workers.prompts.order import PromptCursor, PromptOrder
from penstock.workers.prompts.prompts_actor import Prompts
from penstock.workers.prompts.source import PromptSource
from tests.amounts import amount
from tests.store.driver import make_spec
from tests.store.players import STAGES, train, values_of
from tests.store.visitors import serve
from tests.workers.prompts.test_source import make_config, make_source

NUM_ROWS = 11
skipping = pytest.mark.parametrize("too_long", ["error", "skip"])


def write_rows(tmp_path: Path, too_long: str) -> Path:
    """Some of them too long, where they may be."""
    path = tmp_path / "rows.jsonl"
    questions = ["x" * 60 if too_long == "skip" and n % 4 == 1 else f"{n}+{n}" for n in range(NUM_ROWS)]
    path.write_text("".join(json.dumps({"question": one, "answer": "1"}) + "\n" for one in questions))
    return path


def following(path: Path, too_long: str) -> PromptSource:
    return make_source(path, too_long=too_long)


@skipping
def test_going_to_a_group_is_as_if_so_many_had_been_drawn(tmp_path: Path, too_long: str) -> None:
    path = write_rows(tmp_path, too_long)
    source, dice = following(path, too_long), random.Random(0)
    for _ in range(50):
        number = dice.randrange(60)
        source.go_to(number)
        plain = following(path, too_long)
        plain.next_groups(number)
        assert source.stats() == plain.stats()
        assert source.next_groups(5) == plain.next_groups(5)
        assert source.start_after(number + 5) == plain.start_after(number + 5)


@skipping
def test_it_goes_back_further_than_it_remembers(tmp_path: Path, too_long: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.prompts.source.REMEMBERED_CURSORS", 4)
    path = write_rows(tmp_path, too_long)
    source = following(path, too_long)
    whole = source.next_groups(30)
    source.go_to(2)
    assert source.next_groups(28) == whole[2:]


def test_it_does_not_go_back_beyond_its_start(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "error")
    source = make_source(path, cursor=PromptCursor(0, 7), first_group=7)
    with pytest.raises(DataError, match="the store has 6 groups, and the prompts begin after 7"):
        source.go_to(6)


def test_where_a_run_goes_on_is_known_of_groups_that_another_has_put(tmp_path: Path) -> None:
    """A checkpoint may be taken before the new one has begun."""
    path = write_rows(tmp_path, "skip")
    plain = following(path, "skip")
    plain.next_groups(20)
    assert following(path, "skip").start_after(20) == plain.start_after(20)


@skipping
def test_where_a_run_goes_on_is_known_of_a_store_that_has_had_fewer(tmp_path: Path, too_long: str) -> None:
    """The store was restored in the place of another, and a checkpoint is taken before the prompts hear of it."""
    path = write_rows(tmp_path, too_long)
    source, plain = following(path, too_long), following(path, too_long)
    source.go_to(40)
    source.next_groups(3)
    whole = plain.next_groups(20)
    assert source.start_after(20) == plain.start_after(20)
    source.go_to(10)
    assert source.next_groups(10) == whole[10:]


@given(rows=st.integers(1, 9), drawn=st.integers(0, 30), count=st.integers(0, 40))
def test_skipped_rows_are_rows_drawn(rows: int, drawn: int, count: int) -> None:
    one, other = PromptOrder(rows, 3), PromptOrder(rows, 3)
    for _ in range(drawn):
        one.next(), other.next()
    for _ in range(count):
        one.next()
    other.skip(count)
    assert one.cursor == other.cursor
    assert [one.next() for _ in range(5)] == [other.next() for _ in range(5)]


async def consume(client: StoreClient, steps: range, taken: list[list[int]]) -> None:
    """Everything that comes, as it comes; the prompts of the groups in `taken`, by number."""
    for step in steps:
        for stage in STAGES:
            num_rows = 0
            while num_rows < 4:
                lease = await client.lease(stage, 4 - num_rows if stage in ("reward", "reference") else 2, "worker")
                assert lease is not None
                num_rows += len(lease.rows)
                if stage == "rollout":
                    taken += [ids.tolist() for ids in lease.rows.arrays("prompt_ids")[::2]]
                await client.write(lease, lease.rows.row_ids, values_of(stage, lease, step))
        await train(client, step)
        await client.served(step + 1)


@skipping
@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(4)))
def test_sources_that_are_ended_at_any_moment_put_what_one_would(tmp_path: Path, too_long: str, seed: int) -> None:
    path, dice, taken = write_rows(tmp_path, too_long), random.Random(seed), list[list[int]]()

    async def replace(store: Store) -> None:
        """Sometimes the one before is only cut off, and goes on."""
        running: list[asyncio.Task[None]] = []
        while True:
            source, client = following(path, too_long), StoreClient(store)
            running.append(asyncio.create_task(source.run(client, batch=dice.randint(1, 5))))
            for _ in range(dice.randrange(40)):
                await asyncio.sleep(0)
            if dice.random() < 0.7:
                running[-1].cancel()
                if dice.random() < 0.5:
                    await client.leave()

    async def main() -> None:
        store = Store(make_spec())
        replacing = asyncio.create_task(replace(store))
        await asyncio.wait_for(consume(StoreClient(store), range(20), taken), 30)
        replacing.cancel()

    asyncio.run(main())
    assert taken == [group["prompt_ids"] for group in following(path, too_long).next_groups(40)]


def put_all(endpoint: Endpoint, path: Path, too_long: str, batch: int) -> None:
    """Put all groups, in a process of its own."""
    asyncio.run(following(path, too_long).run(StoreClient(endpoint), batch))


@pytest.mark.real
@skipping
def test_sources_that_are_killed_at_any_moment_put_what_one_would(tmp_path: Path, too_long: str) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    first = processes.Process(target=int)  # those after it start at once
    first.start()
    first.join()
    path, dice, taken = write_rows(tmp_path, too_long), random.Random(1), list[list[int]]()

    num_started = 0

    async def replace(endpoint: Endpoint) -> None:
        nonlocal num_started
        while True:
            process = processes.Process(target=put_all, args=(endpoint, path, too_long, dice.randint(1, 5)))
            process.start()
            num_started += 1
            try:
                await asyncio.sleep(dice.uniform(0.05, 0.4))
            finally:
                process.kill()
                process.join()

    async def body(store: Store, endpoint: Endpoint) -> None:
        replacing = asyncio.create_task(replace(endpoint))
        for step in range(15):
            await consume(StoreClient(store), range(step, step + 1), taken)
            await asyncio.sleep(dice.uniform(0.0, 0.5))  # in which more is put, and its source killed
        replacing.cancel()
        await asyncio.wait({replacing})

    serve(tmp_path, body)
    assert num_started > 5
    assert taken == [group["prompt_ids"] for group in following(path, too_long).next_groups(30)]


def test_an_actor_that_is_given_another_store_goes_on_after_what_that_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one was restored from a snapshot of before: the groups since are put again."""
    path, taken = write_rows(tmp_path, "skip"), list[list[int]]()
    config: RunConfig = make_config(path, too_long="skip")

    def opened(config: RunConfig, model_path: str, **more: object) -> PromptSource:
        return following(path, "skip")

    monkeypatch.setattr("penstock.workers.prompts.prompts_actor.open_source", opened)

    async def main() -> None:
        prompts = Prompts(config, "", "prompts")
        await prompts.start()
        first = Store(make_spec())
        running = asyncio.create_task(prompts.run(first))
        await consume(StoreClient(first), range(5), [])
        second = Store(make_spec())
        again = asyncio.create_task(prompts.run(second))
        await running
        await consume(StoreClient(second), range(6), taken)
        await StoreClient(second).close("done")
        await again

    asyncio.run(asyncio.wait_for(main(), 30))
    assert taken == [group["prompt_ids"] for group in following(path, "skip").next_groups(12)]
