"""Large batches stay on the node of their writer: three nodes in one process, the store's and two others, each with
directories and a server of its own."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.store.client.links import SocketLink
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.store.data.segment_files import SHARE, SPARE_BYTES
from penstock.store.errors import RowsLost, RowsUnreachable, StoreError
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from penstock.store.service.wire import LeaseRequest
from tests.store.players import group, leased, long_responses
from tests.store.visitors import RemoteNode, files_in, linked, remote_nodes, serve, unseen, until

LONG = 4000
"""Tokens of a response."""
MB = 2**20

Body = Callable[[Store, Endpoint, dict[str, RemoteNode]], Awaitable[None]]


def on_nodes(tmp_path: Path, body: Body, **changes: Any) -> None:
    """The store on node a; b and c have directories of their own."""
    remote, nodes = remote_nodes(tmp_path, "bc")

    async def served(store: Store, endpoint: Endpoint) -> None:
        try:
            await body(store, endpoint, remote)
        finally:
            for node in remote.values():
                await asyncio.to_thread(node.close)

    serve(tmp_path, served, node="a", nodes=nodes, **changes)


async def sampled(producer: StoreClient, numbers: Sequence[int] = (0, 1), tokens: int = LONG) -> None:
    await producer.put_groups([group(number) for number in numbers])
    lease = await leased(producer, "rollout", len(numbers), "engine")
    await producer.write(lease, lease.rows.row_ids, long_responses(lease, tokens))


def check(rows: Rows, tokens: int = LONG) -> None:
    assert [(set(ids), len(ids)) for ids in rows.arrays("response_ids")] == [({row}, tokens) for row in rows.row_ids]
    assert rows.lists("prompt_ids") == [[1, 2, 10 + group] for group in rows.group_ids.tolist()]


async def until_collected(holds: Callable[[], bool]) -> None:
    """Wait as `until` does, for what follows the end of arrays. Some arrays lie in cycles, so garbage is collected."""
    await until(lambda: gc.collect() >= 0 and holds())


def test_readers_elsewhere_pull_what_they_read_and_local_ones_map_it(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer = StoreClient(endpoint, node="b")
        await sampled(producer)
        assert len(files_in(remote["b"].shm)) == 1
        assert files_in(tmp_path / "shm") == []
        sent = remote["b"].server
        readers = {
            "local": StoreClient(endpoint, node="b"), "remote": StoreClient(endpoint, node="c"),
            "the store's": StoreClient(endpoint), "a container": StoreClient(unseen(endpoint)),
            "in process": StoreClient(store),
        }  # fmt: skip
        assert isinstance(await linked(readers["the store's"]), SocketLink)
        for name, reader in readers.items():
            before = sent.sent_bytes
            lease = await leased(reader, "reference", 3, name)
            check(lease.rows)
            if name == "in process":  # it takes whole batches
                assert before < sent.sent_bytes
            else:
                ids = 3 * LONG * 4
                assert (sent.sent_bytes - before) // 1000 == (0 if name == "local" else ids // 1000)
            await reader.release(lease)
        assert store.segments is not None
        assert (store.segments.rows.sent_bytes, store.segments.kept) == (0, 0)

    on_nodes(tmp_path, body)


def test_files_are_laid_by_on_a_node_once_a_client_of_it_has_joined(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        await linked(StoreClient(endpoint, node="b"))
        await until(lambda: (remote["b"].shm / "spare-1").exists())
        assert not list(remote["c"].shm.iterdir())
        assert (tmp_path / "shm" / "spare-1").exists()

    on_nodes(tmp_path, body, shared_bytes=2 * SHARE * SPARE_BYTES)


def test_batches_of_several_nodes_are_one_lease(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        clients = [StoreClient(endpoint), *(StoreClient(endpoint, node=node) for node in "bc")]
        for number, client in enumerate(clients):
            await sampled(client, [number])
        for reader in (*clients, StoreClient(unseen(endpoint))):
            lease = await leased(reader, "reference", 6, "reference")
            assert len(lease.rows) == 6
            check(lease.rows)
            await reader.release(lease)
        assert store.segments is not None
        assert store.segments.rows.sent_bytes > 0  # what lies on its node

    on_nodes(tmp_path, body)


def test_a_file_goes_back_to_its_writer_after_the_last_remote_reader(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer, reader = StoreClient(endpoint, node="b"), StoreClient(endpoint, node="c")
        await sampled(producer)
        await reader.spec()
        ask = LeaseRequest("reference", 4, "reader", client=reader.name)
        (granted,) = await reader.link.call("lease", ask)
        await reader.link.call("drop", granted.lease_id, "reference", list(range(4)), "test", "")
        arena = (await linked(producer))._arena  # type: ignore[union-attr]
        await sampled(producer, [2])  # into another file
        assert len(files_in(remote["b"].shm)) == 2
        ((_, rows),) = await reader.read([granted])
        check(rows)
        await until_collected(lambda: bool(arena._free))
        await sampled(producer, [3])  # into the one that came back
        assert len(files_in(remote["b"].shm)) == 2

    on_nodes(tmp_path, body)


def test_what_a_dead_writer_leaves_goes_with_its_rows(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer, reader = StoreClient(endpoint, node="b"), StoreClient(endpoint, node="c")
        await sampled(producer)
        (handed_over,) = files_in(remote["b"].shm)
        (remote["b"].shm / f"{producer.name}-7").write_bytes(bytes(100))  # never handed over
        (remote["b"].shm / "another-7").write_bytes(bytes(100))
        (await linked(producer)).wire.close()  # type: ignore[union-attr]
        await until(lambda: files_in(remote["b"].shm) == sorted(["another-7", handed_over]))
        lease = await leased(reader, "reference", 4, "reader")
        check(lease.rows)
        await reader.drop(lease, lease.rows.row_ids, "test")
        await until_collected(lambda: files_in(remote["b"].shm) == ["another-7"])

    on_nodes(tmp_path, body)


@pytest.mark.real
def test_beyond_its_budget_a_node_moves_rows_to_its_own_disk(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer = StoreClient(endpoint, node="b")
        for number in range(3):
            await sampled(producer, [number], tokens=40_000)
        disk = remote["b"].disk
        await until(lambda: disk.exists() and len(files_in(disk)) == 1)
        await until(lambda: len(files_in(remote["b"].shm)) == 2)
        assert (await producer.stats())["store/spilled_bytes"] > MB // 2
        for node in "bc":
            reader = StoreClient(endpoint, node=node)
            lease = await leased(reader, "reference", 6, "reader")
            check(lease.rows, 40_000)
            await reader.release(lease)
        lease = await leased(producer, "reference", 6, "reader")
        await producer.drop(lease, lease.rows.row_ids, "test")
        del lease
        await until_collected(lambda: not files_in(disk))

    on_nodes(tmp_path, body, shared_bytes=2 * MB)


def test_a_batch_goes_by_value_where_its_node_has_no_room(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer, reader = StoreClient(endpoint, node="b"), StoreClient(endpoint, node="c")
        remote["b"].shm.rmdir()
        await sampled(producer)
        assert (await producer.stats())["store/large_by_value"] == 1
        lease = await leased(reader, "reference", 4, "reader")
        check(lease.rows)

    on_nodes(tmp_path, body)


def test_rows_of_a_node_that_is_gone_are_an_error_by_name_and_no_lease(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer, reader = StoreClient(endpoint, node="b"), StoreClient(endpoint, node="c")
        await sampled(producer)
        lease = await leased(reader, "reference", 1, "reader")
        await reader.release(lease)
        await asyncio.to_thread(remote["b"].close)  # also the connection that is kept
        with pytest.raises(RowsUnreachable, match="rows on node b at 127"):
            await reader.lease("reference", 4, "reader")
        while (await producer.stats())["store/leases"]:
            await asyncio.sleep(0.01)
        assert store.segments is not None
        assert not any(+segment.uses for segment in store.segments.book.segments.values())

    on_nodes(tmp_path, body, lease_timeout_s=0.2)


def test_rows_whose_files_are_gone_with_their_store_are_lost_by_name(tmp_path: Path) -> None:
    """Who still has a grant of a store that has died hears what another store can help with."""

    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer, reader = StoreClient(endpoint, node="b"), StoreClient(endpoint, node="c")
        await sampled(producer)
        remote["b"].server.clear()
        with pytest.raises(RowsLost, match=r"rows of node b: segment .* is in none of"):
            await reader.lease("reference", 4, "reader")

    on_nodes(tmp_path, body, lease_timeout_s=0.2)


def test_who_cannot_read_rows_of_a_node_waits_until_it_counts_as_lost(tmp_path: Path) -> None:
    """Then the rows are made again, and come to whoever asked for them."""

    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer, reader = StoreClient(endpoint, node="b"), StoreClient(endpoint, node="c")
        await sampled(producer)
        await asyncio.to_thread(remote["b"].close)
        asking = asyncio.create_task(reader.lease("reference", 4, "reader"))
        await asyncio.sleep(0.1)
        controller = StoreClient(endpoint)
        await controller.lost("nobody has heard of it")
        assert (await controller.stats())["completed/rollout"] == 4
        await controller.lost("b")
        await sampled(StoreClient(endpoint), [0, 1])  # the first two groups, again
        lease = await asking
        assert lease is not None
        assert lease.rows.row_ids.tolist() == [0, 1, 2, 3]
        check(lease.rows)
        more = await leased(producer, "rollout", 2, "engine")
        with pytest.raises(StoreError, match="counts as lost"):
            await producer.write(more, more.rows.row_ids, long_responses(more, LONG))

    on_nodes(tmp_path, body)


def test_a_snapshot_has_the_rows_of_all_nodes_as_they_were_at_the_cut(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        producer = StoreClient(endpoint, node="b")
        await sampled(producer)
        await sampled(StoreClient(endpoint), [2])
        await producer.cut()
        lease = await leased(producer, "reference", 4, "reader")
        await producer.drop(lease, lease.rows.row_ids, "test")
        await producer.snapshot(str(tmp_path / "snapshots"), 1)
        del lease
        await until_collected(lambda: not store.segments.book._in_use["b"])  # type: ignore[union-attr]
        assert (await producer.stats())["store/rows"] == 2

    async def restored(store: Store, endpoint: Endpoint) -> None:
        lease = await StoreClient(endpoint).lease("reference", 6, "reader")
        assert lease is not None
        assert len(lease.rows) == 6
        check(lease.rows)

    on_nodes(tmp_path, body)
    serve(tmp_path / "later", restored, restore=str(tmp_path / "snapshots"))


def test_a_lie_about_a_segment_is_refused(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        liar = StoreClient(endpoint, node="b")
        await liar.spec()
        (await linked(liar))._arena._node = "c"  # type: ignore[union-attr]
        with pytest.raises(Exception, match="of node c is not its writer's"):
            await sampled(liar)

    on_nodes(tmp_path, body)


@pytest.mark.parametrize("node", ["b", "c"])
def test_of_two_that_wait_the_one_on_the_rows_node_is_next(tmp_path: Path, node: str) -> None:
    async def body(store: Store, endpoint: Endpoint, remote: dict[str, RemoteNode]) -> None:
        readers = {name: StoreClient(endpoint, node=name) for name in "bc"}
        order = sorted(readers, key=lambda name: name == node)  # the remote one asks first
        asking = {name: asyncio.ensure_future(readers[name].lease("reference", 1, name)) for name in order}
        for number in range(2):
            while len(store.consumers["reference"]) < 2:
                await asyncio.sleep(0.001)
            await sampled(StoreClient(endpoint, node=node), [number])  # two rows, one for each
            leases = {name: await asking[name] for name in order}
            rows = {name: lease.rows.row_ids.tolist() for name, lease in leases.items() if lease is not None}
            assert rows == {node: [2 * number], order[0]: [2 * number + 1]}
            for name in order:
                lease = leases[name]
                assert lease is not None
                await readers[name].drop(lease, lease.rows.row_ids, "test")
                asking[name] = asyncio.ensure_future(readers[name].lease("reference", 1, name))
        for waiting in asking.values():
            waiting.cancel()
        assert remote[node].server.sent_bytes < 3 * LONG * 4  # the remote one's

    on_nodes(tmp_path, body)
