"""Messages arrive whole and in order, however the bytes are cut; a client that goes away takes its requests along."""

import asyncio
import contextlib
import gc
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.conf.errors import WorkerDied
from penstock.network.connection import HEADER, MAX_BODY
from penstock.store.client.links import SocketLink
from penstock.store.client.store_client import StoreClient
from penstock.store.data.codec import Codec, InlineBatch
from penstock.store.data.segments import Segments
from penstock.store.errors import StoreError, UnknownStage
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint, StoreServer
from penstock.store.service.wire import ANSWER, MAX_BYTES, SCRATCH, CallTypes, Hello, LeaseRequest, StoreAnswer
from tests.store.driver import make_spec
from tests.store.frames import frame, read
from tests.store.players import group, leased, values_of
from tests.store.visitors import files_in, serve, until, visit


def batch_of(num_rows: int, num_columns: int = 1) -> pa.RecordBatch:
    numbers = {f"x{number}": pa.array(np.arange(num_rows)) for number in range(num_columns)}
    lists = pa.array([list(range(row % 3)) for row in range(num_rows)], pa.list_(pa.int32()))
    return pa.record_batch({**numbers, "lists": lists, "é": pa.array(["é"] * num_rows, pa.string())})


def messages() -> list[Any]:
    return [
        "name",
        [1, "spec", {"a": 1.5, "b": None}],
        InlineBatch(batch_of(7)),
        np.arange(12_000).reshape(-1, 4),
        InlineBatch(batch_of(40_000)),
        StoreError("no such thing"),
        ["x" * SCRATCH],
        InlineBatch(batch_of(0)),
        None,
    ]


def carried(messages: list[Any], chunk: int) -> list[Any]:
    """What arrives, read in pieces of at most `chunk` bytes."""
    heard: list[Any] = []
    known = (InlineBatch, np.ndarray, StoreError)

    def hear(number: int, body: memoryview, area: pa.Buffer) -> None:
        kind = type(messages[number]) if isinstance(messages[number], known) else Any
        heard.append(Codec().decode(kind, body, area))

    sent = b"".join(frame(message, number) for number, message in enumerate(messages))
    assert not read(sent, chunk, hear).aborted
    return heard


@pytest.mark.parametrize("chunk", [1, 7, 1000, SCRATCH - 1, SCRATCH, 10**9])
def test_messages_arrive_whole_and_in_order_however_they_are_cut(chunk: int) -> None:
    expected = messages() * (1 if chunk < 100 else 3)
    for found, message in zip(carried(expected, chunk), expected, strict=True):
        if isinstance(message, np.ndarray):
            assert found.tolist() == message.tolist()
        elif isinstance(message, StoreError):
            assert (type(found), str(found)) == (StoreError, "no such thing")
        else:
            assert found == message


@pytest.mark.parametrize("rows", [10, 5000])
def test_a_batch_may_have_any_number_of_columns(rows: int) -> None:
    (heard,) = carried([InlineBatch(batch_of(rows, 500))], SCRATCH)
    assert heard.batch.equals(batch_of(rows, 500))


@pytest.mark.parametrize("rows", [10, 5000])
def test_values_lie_at_multiples_of_their_size(rows: int) -> None:
    (heard,) = carried([InlineBatch(batch_of(rows))], SCRATCH)
    assert all(buffer.address % 8 == 0 for column in heard.batch.columns for buffer in column.buffers() if buffer)


def test_a_message_that_announces_too_much_ends_its_connection() -> None:
    """Memory is taken up only as a message comes."""

    def hear(*_: Any) -> None:
        pytest.fail("no message was whole")

    for head in (HEADER.pack(0, MAX_BODY + 1, 0), HEADER.pack(0, 4, MAX_BYTES + 1), b"\xff" * 20):
        assert read(head + b"more", 10, hear).aborted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not read(HEADER.pack(0, 4, 2**30) + b"more", 10, hear).aborted
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_calls_errors_and_large_batches_go_over_the_socket(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        with pytest.raises(UnknownStage, match="did you mean 'rollout'"):
            await client.lease("rollouts", 1, "engine")
        with pytest.raises(StoreError, match="no call '_changed'"):
            await client.link.call("_changed")
        waiting = asyncio.ensure_future(client.lease("rollout", 2, "engine"))
        await client.put_groups([{"prompt_ids": [1] * 2000, "task": "{}"}, group(1)])
        lease = await waiting
        assert lease is not None
        assert lease.rows.lists("prompt_ids")[0] == [1] * 2000
        await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        assert (await client.stats())["store/shared_bytes"] > 8000

    serve(tmp_path, body)


class Unsendable(Exception):
    """Cannot be made from its message: its class wants two arguments."""

    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{word} {number}")


class Oddities:
    """Serves answers that are no plain data."""

    async def value(self) -> Any:
        return lambda: None

    async def number(self) -> int:
        return 2**70

    async def error(self) -> str:
        raise Unsendable(7, "odd")

    async def fine(self) -> str:
        return "fine"

    async def left(self, client: str) -> None:
        pass

    def waits(self, calls: Any) -> bool:
        return False


def test_an_answer_that_cannot_travel_is_an_error_of_its_caller_alone(tmp_path: Path) -> None:
    async def main() -> None:
        places = (str(tmp_path / "shm"), str(tmp_path / "disk"))
        names = ("value", "number", "error", "fine")
        calls = CallTypes(Oddities, names)
        server = StoreServer(Oddities(), calls, Segments(*places, 10_000), tmp_path / "socket")
        await server.start()
        link = await SocketLink.connect(Endpoint("", str(server.path), places), "client", calls)
        assert link is not None
        waiting = asyncio.gather(*(link.call(name) for name in names), return_exceptions=True)
        value, number, error, fine = await asyncio.wait_for(waiting, 20)
        for unsent, name in ((value, "value"), (number, "number")):
            assert isinstance(unsent, StoreError)
            assert f"the answer of {name!r} cannot be sent" in str(unsent)
        assert isinstance(error, StoreError)
        assert "Unsendable: odd 7" in str(error)
        assert fine == "fine"
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("said", [b"\0\0\0\0\4", b"GET / HTTP/1.1\r\n\r\n", frame(Hello("../up")), frame([], 1)])
def test_a_connection_that_speaks_something_else_is_ended_and_no_other(tmp_path: Path, said: bytes) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        reader, writer = await asyncio.open_unix_connection(endpoint.path)
        writer.write(said.ljust(HEADER.size, b"\xff") + b"more")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert (await client.stats())["store/malformed_messages"] == 1

    serve(tmp_path, body)


def test_an_answer_that_is_none_ends_the_connection_of_who_asked(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(frame(StoreAnswer(0, "neither true nor false"), ANSWER))

    async def main() -> None:
        async with await asyncio.start_unix_server(answer, tmp_path / "socket"):
            link = await SocketLink.connect(Endpoint("", str(tmp_path / "socket"), ("", "")), "client")
            assert link is not None
            with pytest.raises(WorkerDied):
                await asyncio.wait_for(link.call("batch_ready"), 20)

    asyncio.run(main())


def test_what_a_client_held_or_waited_for_is_free_as_soon_as_it_is_gone(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        dead, link = await visit(endpoint)
        await dead.put_groups([group()])
        held = await leased(dead, "rollout", 1, "engine")
        waiting = asyncio.ensure_future(dead.lease("reward", 1, "engine"))
        (tmp_path / "shm" / f"{dead.name}-99").write_bytes(b"never handed over")
        await asyncio.sleep(0.01)
        link.wire.close()
        with pytest.raises(WorkerDied, match="the store's process is gone"):
            await waiting
        survivor, _ = await visit(endpoint)
        lease = await asyncio.wait_for(survivor.lease("rollout", 1, "other"), 5)
        assert lease is not None
        assert lease.rows.row_ids.tolist() == held.rows.row_ids.tolist()
        assert not any(map(len, store.consumers.values()))
        await until(lambda: not list((tmp_path / "shm").glob(f"{dead.name}-*")))

    serve(tmp_path, body)


def test_a_lease_that_arrives_after_its_asker_left_goes_back_and_is_not_read(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        asking = asyncio.ensure_future(client.lease("rollout", 1, "gone"))
        while not len(store.consumers["rollout"]):
            await asyncio.sleep(0)
        await StoreClient(store).put_groups([long_group()])
        while not store.ledger.residents.leases.held:  # granted: the answer lies in the socket
            await asyncio.sleep(0)
        assert asking.cancel()
        while store.ledger.residents.leases.held:
            await asyncio.sleep(0)
        again = await leased(client, "rollout", 1, "engine")
        assert again.rows.lists("prompt_ids")[0] == [1] * 2000
        await client.drop(again, again.rows.row_ids, "test")
        assert asking.cancelled()
        del again
        await client.stats()  # tells what was let go
        assert (await client.stats())["store/shared_bytes"] == 0

    serve(tmp_path, body)


def long_group() -> dict[str, Any]:
    """More than travels inline."""
    return {"prompt_ids": [1] * 2000, "task": "{}"}


def test_a_grant_that_cannot_be_read_goes_back_and_is_asked_for_again(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        for _ in range(3):
            await client.put_groups([long_group()])
        hidden = [file.rename(tmp_path / file.name) for file in (tmp_path / "shm").glob(f"{client.name}-1")]
        assert len(hidden) == 1
        async with client.leases("rollout", 1, "engine") as stream:
            asking = asyncio.ensure_future(anext(stream))
            for is_held in (True, False):  # granted, and given back
                while bool(store.ledger.residents.leases.held) is not is_held:
                    await asyncio.sleep(0)
            assert not asking.done()
            assert client.heartbeat.held == {}
            for file in hidden:
                file.rename(tmp_path / "shm" / file.name)
            first = await asking
            assert first.rows.lists("prompt_ids")[::2] == [[1] * 2000]
            await client.release(first)
        del first, asking
        lease = await leased(client, "rollout", 3, "engine")
        assert lease.rows.lists("prompt_ids")[::2] == [[1] * 2000] * 3
        await client.drop(lease, lease.rows.row_ids, "test")
        del lease, stream
        gc.collect()  # the error's frames hold the lease before it
        await client.stats()
        assert (await client.stats())["store/shared_bytes"] == 0  # no reading is waited for that never was

    serve(tmp_path, body)


def test_segments_go_with_their_last_row_and_spill_beyond_the_budget(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        for number in range(4):
            await client.put_groups([{"prompt_ids": [number] * 2000, "task": "{}"}])
        stats = await client.stats()
        assert stats["store/shared_bytes"] <= 20_000
        assert stats["store/spilled_bytes"] > 8000
        assert list((tmp_path / "disk").glob(f"{client.name}-*"))
        rows = []
        for number in range(4):
            lease = await leased(client, "rollout", 1, "engine")
            assert lease.rows.lists("prompt_ids")[0] == [number] * 2000
            rows.append(lease.rows)
            await client.drop(lease, lease.rows.row_ids, "test")
        stats = await client.stats()
        assert (stats["store/shared_bytes"], stats["store/spilled_bytes"], stats["store/blocks"]) == (0, 0, 0)
        assert [row.lists("prompt_ids")[0][0] for row in rows] == [0, 1, 2, 3]  # pages that are mapped stay

    serve(tmp_path, body, shared_bytes=20_000)


def test_a_snapshot_keeps_what_ends_while_it_is_written(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        await client.put_groups([{"prompt_ids": [7] * 2000, "task": "{}"}])
        writing = asyncio.ensure_future(client.snapshot(str(tmp_path / "snapshots"), 1))
        await asyncio.sleep(0)
        lease = await leased(client, "rollout", 1, "engine")
        await client.drop(lease, lease.rows.row_ids, "test")
        await writing
        restored = Store(make_spec(), restore=tmp_path / "snapshots")
        again = await StoreClient(restored).lease("rollout", 1, "engine")
        assert again is not None
        assert again.rows.lists("prompt_ids")[0] == [7] * 2000

    serve(tmp_path, body)


def test_a_refused_writes_segment_goes_back_to_its_writer_and_away_with_it(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, link = await visit(endpoint)
        await client.put_groups([group()])
        lease = await leased(client, "rollout", 1, "engine")
        await client.release(lease)
        values = values_of("rollout", lease) | {"response_text": ["x" * 5000] * 2}
        for _ in range(3):
            with pytest.raises(StoreError):
                await client.write(lease, lease.rows.row_ids, values)
        assert (await client.stats())["store/shared_bytes"] == 0
        assert len(files(tmp_path)) <= 2
        link.wire.close()
        while files(tmp_path):
            await asyncio.sleep(0.005)

    serve(tmp_path, body)


def test_a_request_that_comes_with_its_own_withdrawal_is_not_granted(tmp_path: Path) -> None:
    """Both in one read of the store's, as of a client that is cancelled while the store is busy."""

    async def body(store: Store, endpoint: Endpoint) -> None:
        client, link = await visit(endpoint)
        await client.put_groups([group()])
        asking = asyncio.ensure_future(link.call("lease", LeaseRequest("rollout", 1, "gone", client="c", ticket=7)))
        withdrawing = asyncio.ensure_future(link.call("many", [("withdraw", ("rollout", "c", 7))]))
        assert await withdrawing == [(None, None)]
        await asyncio.gather(asking, return_exceptions=True)
        assert not store.ledger.residents.leases.held

    serve(tmp_path, body)


def test_a_call_cancelled_in_the_moment_of_its_answer_reads_nothing_of_it(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, link = await visit(endpoint)
        await client.put_groups([{"prompt_ids": [7] * 2000, "task": "{}"}])
        asking = asyncio.ensure_future(client.lease("rollout", 1, "gone"))
        hear = link.wire._on_message

        def cancelled(*message: Any) -> None:
            hear(*message)
            asking.cancel()

        link.wire._on_message = cancelled
        with pytest.raises(asyncio.CancelledError):
            await asking
        link.wire._on_message = hear
        assert store.segments is not None
        (segment,) = store.segments.book.segments.values()
        while +segment.uses or store.ledger.residents.leases.held:
            await asyncio.sleep(0.005)

    serve(tmp_path, body)


def test_a_segment_is_written_anew_only_after_its_last_reader(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        producer, _ = await visit(endpoint)
        consumer, _ = await visit(endpoint)
        held = []
        for number in range(20):
            await producer.put_groups([{"prompt_ids": np.full(2000, number, np.int32), "task": "{}"}])
            lease = await leased(consumer, "rollout", 1, "engine")
            if number % 3 == 0:
                held.append((number, lease.rows.arrays("prompt_ids")[0]))
                held = held[-2:]
            await consumer.drop(lease, lease.rows.row_ids, "test")
            del lease
            for expected, array in held:
                assert (array == expected).all()
        assert len(files(tmp_path)) <= 6

    serve(tmp_path, body, group_size=1)  # two samples of a prompt would be copies of it


def files(tmp_path: Path) -> list[str]:
    return files_in(tmp_path / "shm")
