"""While a file is written or moved to disk the store serves others, and whoever goes meanwhile leaves nothing."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.store.client.store_client import StoreClient
from penstock.store.data import segments as segments_module
from penstock.store.data.codec import InlineBatch, SegmentRef
from penstock.store.data.segment_files import move
from penstock.store.errors import StoreClosed, StoreError
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from penstock.store.service.wire import WriteRequest
from tests.store.players import group, leased, values_of
from tests.store.visitors import files_in, serve, until, visit, visit_remotely

LARGE = [{"prompt_ids": [7] * 2000, "task": "{}"}]
WAIT_S = 300.0


class Gate:
    """Holds up whoever moves a file."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def move(self, source: Path, target: Path) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        move(source, target)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(segments_module, "move", gate.move)
    yield gate
    gate.opened.set()


async def check_first(client: StoreClient, expected: list[int]) -> None:
    lease = await leased(client, "rollout", 1, "engine")
    assert lease.rows.lists("prompt_ids")[0] == expected


@pytest.mark.parametrize("come", [visit, visit_remotely])
def test_others_are_served_while_a_batch_is_moved_to_disk(tmp_path: Path, gate: Gate, come: Any) -> None:
    """One that lies in shared memory already, and one that comes by value."""

    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await come(endpoint)
        other, _ = await visit(endpoint)
        putting = asyncio.ensure_future(client.put_groups(LARGE))
        await until(gate.reached.is_set)
        assert await other.put_groups([group()]) == [0]
        assert not putting.done()
        gate.opened.set()
        assert await putting == [1]
        assert len(files_in(tmp_path / "disk")) == 1
        assert files_in(tmp_path / "shm") == []
        assert (await other.stats())["store/spilled_bytes"] > 8000
        await check_first(other, group()["prompt_ids"])
        await check_first(other, [7] * 2000)

    serve(tmp_path, body, shared_bytes=1000)


def test_results_that_must_be_moved_hold_up_the_calls_of_their_client_alone(tmp_path: Path, gate: Gate) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        other, _ = await visit(endpoint)
        await client.put_groups([group(), group(1)])
        lease, others = await client.lease("rollout", 1, "a"), await other.lease("rollout", 1, "b")
        assert lease is not None
        assert others is not None
        values = values_of("rollout", lease) | {"response_text": ["x" * 5000] * 2}
        writing = asyncio.ensure_future(client.write(lease, lease.rows.row_ids, values))
        await until(gate.reached.is_set)
        await other.write(others, others.rows.row_ids, values_of("rollout", others))
        assert not writing.done()
        gate.opened.set()
        await writing
        assert store.ledger.counters["completed/rollout"] == 4

    serve(tmp_path, body, shared_bytes=1000)


def test_results_that_travel_together_are_answered_however_many_must_be_moved(tmp_path: Path) -> None:
    """Each has room by itself, and the second none after the first."""

    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        await client.put_groups([group(number) for number in range(3)])
        leases = [await client.lease("rollout", 1, "a") for _ in range(3)]

        async def write(lease: Any) -> None:
            values = values_of("rollout", lease) | {"response_text": ["x" * 5000] * 2}
            await client.write(lease, lease.rows.row_ids, values)

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(client.renew(leases[0]), *map(write, leases))
        assert store.ledger.counters["completed/rollout"] == 6
        assert (await client.stats())["store/spilled_bytes"] > 0
        assert len(files_in(tmp_path / "shm")) == 1
        assert len(files_in(tmp_path / "disk")) == 2

    serve(tmp_path, body, shared_bytes=16_000)


def test_a_refused_result_holds_up_none_that_travel_with_it(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, link = await visit_remotely(endpoint)
        await client.put_groups([group(), group(1)])
        bad, good = await client.lease("rollout", 1, "a"), await client.lease("rollout", 1, "a")
        assert bad is not None
        assert good is not None
        rows = good.rows.row_ids.tolist()
        values = values_of("rollout", good) | {"response_text": ["x" * 5000] * 2}
        batch, facts, _ = client._encode(await client.spec(), values, rows)
        large = WriteRequest(good.id, "rollout", rows, batch.schema.names, InlineBatch(batch), facts)
        nowhere = SegmentRef("gone-0", 0, 2, (), 100)
        lost = replace(large, lease_id=bad.id, row_ids=bad.rows.row_ids.tolist(), sent=nowhere)
        async with asyncio.timeout(WAIT_S):
            (_, refused), (_, taken) = await link.call("many", [("write", (lost,)), ("write", (large,))])
        assert isinstance(refused, StoreError)
        assert taken is None
        assert store.ledger.counters["completed/rollout"] == 2

    serve(tmp_path, body)


def test_a_client_that_goes_while_its_batch_is_moved_leaves_no_file(tmp_path: Path, gate: Gate) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, link = await visit(endpoint)
        putting = asyncio.ensure_future(client.put_groups(LARGE))
        await until(gate.reached.is_set)
        link.wire.close()
        await asyncio.gather(putting, return_exceptions=True)
        await until(lambda: not store.puts.under_way)
        gate.opened.set()
        await until(lambda: not files_in(tmp_path / "disk") and not files_in(tmp_path / "shm"))
        assert store.ledger.residents.next_group == 0
        assert store.segments is not None
        assert not store.segments.book.segments

    serve(tmp_path, body, shared_bytes=1000)


def test_a_batch_that_the_disk_does_not_take_is_refused_and_its_file_goes_back(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        (tmp_path / "disk").rename(tmp_path / "elsewhere")
        for _ in range(3):
            with pytest.raises(StoreError, match=r"cannot be moved to .*disk.*store\.spill_dir"):
                await client.put_groups(LARGE)
        (tmp_path / "elsewhere").rename(tmp_path / "disk")
        assert store.segments is not None
        assert store.segments.book.bytes == 0
        assert await client.put_groups(LARGE) == [0]

    serve(tmp_path, body, shared_bytes=1000)


def test_a_move_after_the_stores_end_is_refused_by_name_and_leaving_is_free(tmp_path: Path, gate: Gate) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        clients = [(await visit(endpoint))[0] for _ in range(2)]
        assert store.segments is not None
        moving = [asyncio.ensure_future(client.put_groups(LARGE)) for client in clients]
        await until(lambda: gate.reached.is_set() and len(store.segments._moving) == 2)
        closing = asyncio.create_task(asyncio.to_thread(store.segments._file_thread.close))
        await until(lambda: store.segments._file_thread._thread._shutdown)
        gate.opened.set()
        await closing
        answers = await asyncio.gather(*moving, return_exceptions=True)
        assert [type(answer) for answer in answers] == [list, StoreClosed]
        store.segments._departed.add("somebody")
        await store.segments._remove_unclaimed()
        assert store.segments._unclaimed_task is None

    serve(tmp_path, body, shared_bytes=1000)
