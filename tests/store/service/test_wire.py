"""Messages arrive whole and in order, however the bytes are cut; a client that goes away takes its requests along."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.conf.errors import WorkerDied
from penstock.store.client.client import StoreClient
from penstock.store.client.links import OverSocket
from penstock.store.data.roots import OWNER_NAME
from penstock.store.data.segments import Segments
from penstock.store.errors import StoreError, UnknownStage
from penstock.store.service.server import Endpoint, Server
from penstock.store.service.store import Store
from penstock.store.service.wire import SCRATCH, Wire
from tests.store.driver import make_spec
from tests.store.players import group, values_of
from tests.store.visitors import serve, visit


class Recorder:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> None:
        self.data += data


def messages() -> list[Any]:
    batch = pa.record_batch({"x": pa.array(np.arange(40_000))})
    return ["name", (1, "spec", ()), (2, "many", [("write", (np.arange(9000), "é"))]), batch, (3, b"x" * SCRATCH), None]


def carried(sent: list[Any], chunk: int, **options: Any) -> list[Any]:
    """What arrives, read in pieces of at most `chunk` bytes."""
    recorder, heard = Recorder(), list[Any]()
    sender = Wire(lambda _: None, lambda: None, **options)
    sender.connection_made(recorder)  # type: ignore[arg-type]
    receiver = Wire(heard.append, lambda: None)
    for message in sent:
        sender.send(message)
    data, position = memoryview(recorder.data), 0
    while position < len(data):
        room = receiver.get_buffer(-1)
        assert len(room), "asyncio ends a connection that has no room for what has come"
        count = min(len(room), chunk, len(data) - position)
        room[:count] = data[position : position + count]
        position += count
        receiver.buffer_updated(count)
    return heard


@pytest.mark.parametrize("chunk", [1, 7, 1000, SCRATCH - 1, SCRATCH, 10**9])
def test_messages_arrive_whole_and_in_order_however_they_are_cut(chunk: int) -> None:
    sent = messages() * (1 if chunk < 100 else 3)
    heard = carried(sent, chunk)
    assert len(heard) == len(sent)
    for found, expected in zip(heard, sent, strict=True):
        if isinstance(expected, pa.RecordBatch):
            assert found.equals(expected)
        elif isinstance(expected, tuple) and expected[1] == "many":
            assert (found[2][0][1][0] == expected[2][0][1][0]).all()
        else:
            assert found == expected


@pytest.mark.parametrize("count", [1024, 1025, 8191, 20_000])
def test_a_message_may_have_any_number_of_large_buffers(count: int) -> None:
    arrays = [np.full(1, number) for number in range(count)]
    (heard,) = carried([arrays], SCRATCH, beside=8)
    assert np.concatenate(heard).tolist() == list(range(count))


def test_calls_errors_and_large_batches_go_over_the_socket(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        with pytest.raises(UnknownStage, match="did you mean 'rollout'"):
            await client.lease("rollouts", 1, "engine")
        with pytest.raises(StoreError, match="no call '_changed'"):
            await client._link.call("_changed")
        waiting = asyncio.ensure_future(client.lease("rollout", 2, "engine"))
        await client.put_groups([{"prompt_ids": [1] * 2000, "task": "{}"}, group(1)])
        lease = await waiting
        assert lease is not None
        assert lease.rows.lists("prompt_ids")[0] == [1] * 2000
        await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        assert (await client.stats())["store/shared_bytes"] > 8000

    serve(tmp_path, body)


class Unsendable(Exception):
    """Pickles, and cannot be loaded: its class wants two arguments."""

    def __init__(self, number: int, word: str) -> None:
        super().__init__(f"{word} {number}")


class Oddities:
    """Serves answers that pickle refuses, or cannot load."""

    async def value(self) -> Any:
        return lambda: None

    async def error(self) -> None:
        raise Unsendable(7, "odd")

    async def fine(self) -> str:
        return "fine"

    async def left(self, client: str) -> None:
        pass


def test_an_answer_that_cannot_travel_is_an_error_of_its_caller_alone(tmp_path: Path) -> None:
    async def main() -> None:
        places = (str(tmp_path / "shm"), str(tmp_path / "disk"))
        server = Server(Oddities(), Segments(*places, 10_000), tmp_path / "socket")
        await server.start()
        link = await OverSocket.connect(Endpoint("", str(server.path), places), "client")
        assert link is not None
        waiting = asyncio.gather(*(link.call(name) for name in ("value", "error", "fine")), return_exceptions=True)
        value, error, fine = await asyncio.wait_for(waiting, 20)
        assert isinstance(value, StoreError)
        assert "the answer of 'value' cannot be sent" in str(value)
        assert isinstance(error, StoreError)
        assert "Unsendable: odd 7" in str(error)
        assert fine == "fine"
        server.close()

    asyncio.run(main())


def test_what_a_client_held_or_waited_for_is_free_as_soon_as_it_is_gone(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        dead, link = await visit(endpoint)
        await dead.put_groups([group()])
        held = await dead.lease("rollout", 1, "engine")
        assert held is not None
        waiting = asyncio.ensure_future(dead.lease("reward", 1, "engine"))
        (tmp_path / "shm" / f"{dead._name}-99").write_bytes(b"never handed over")
        await asyncio.sleep(0.01)
        link._wire.close()
        with pytest.raises(WorkerDied, match="the store's process is gone"):
            await waiting
        survivor, _ = await visit(endpoint)
        lease = await asyncio.wait_for(survivor.lease("rollout", 1, "other"), 5)
        assert lease is not None
        assert lease.rows.row_ids.tolist() == held.rows.row_ids.tolist()
        assert not any(map(len, store._consumers.values()))
        assert not list((tmp_path / "shm").glob(f"{dead._name}-*"))

    serve(tmp_path, body)


def test_a_lease_that_arrives_after_its_asker_has_gone_goes_back_and_is_read_by_nobody(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        asking = asyncio.ensure_future(client.lease("rollout", 1, "gone"))
        while not len(store._consumers["rollout"]):
            await asyncio.sleep(0)
        await StoreClient(store).put_groups([long_group()])
        while not store.ledger.residents.leases.held:  # granted: the answer lies in the socket
            await asyncio.sleep(0)
        assert asking.cancel()
        while store.ledger.residents.leases.held:
            await asyncio.sleep(0)
        again = await client.lease("rollout", 1, "engine")
        assert again is not None
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


def test_a_grant_that_cannot_be_read_goes_back_at_once(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        for _ in range(3):
            await client.put_groups([long_group()])
        hidden = [file.rename(tmp_path / file.name) for file in (tmp_path / "shm").glob(f"{client._name}-1")]
        assert len(hidden) == 1
        stream = client.leases("rollout", 1, "engine", ahead=2)
        with pytest.raises(StoreError, match="is in none of"):
            await anext(stream)
        while store.ledger.residents.leases.held:
            await asyncio.sleep(0)
        assert client._heartbeat.held == {}
        for file in hidden:
            file.rename(tmp_path / "shm" / file.name)
        lease = await client.lease("rollout", 3, "engine")
        assert lease is not None
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
        assert list((tmp_path / "disk").glob(f"{client._name}-*"))
        rows = []
        for number in range(4):
            lease = await client.lease("rollout", 1, "engine")
            assert lease is not None
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
        lease = await client.lease("rollout", 1, "engine")
        assert lease is not None
        await client.drop(lease, lease.rows.row_ids, "test")
        await writing
        restored = Store(make_spec(), restore=tmp_path / "snapshots")
        again = await StoreClient(restored).lease("rollout", 1, "engine")
        assert again is not None
        assert again.rows.lists("prompt_ids")[0] == [7] * 2000

    serve(tmp_path, body)


def test_the_segment_of_a_refused_write_goes_back_to_its_writer_and_away_with_it(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, link = await visit(endpoint)
        await client.put_groups([group()])
        lease = await client.lease("rollout", 1, "engine")
        assert lease is not None
        await client.release(lease)
        values = values_of("rollout", lease) | {"response_text": ["x" * 5000] * 2}
        for _ in range(3):
            with pytest.raises(StoreError):
                await client.write(lease, lease.rows.row_ids, values)
        assert (await client.stats())["store/shared_bytes"] == 0
        assert len(files(tmp_path)) <= 2
        link._wire.close()
        await asyncio.sleep(0.01)
        assert files(tmp_path) == []

    serve(tmp_path, body)


def test_a_segment_is_written_anew_only_after_its_last_reader(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        producer, _ = await visit(endpoint)
        consumer, _ = await visit(endpoint)
        held = []
        for number in range(20):
            await producer.put_groups([{"prompt_ids": np.full(2000, number, np.int32), "task": "{}"}])
            lease = await consumer.lease("rollout", 1, "engine")
            assert lease is not None
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
    return [file.name for file in (tmp_path / "shm").iterdir() if file.name not in ("socket", OWNER_NAME)]
