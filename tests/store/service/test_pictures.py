"""Pictures in the store: once a group, or once a write, in memory, on the wire and in who reads them; and freed with
their last row."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.graph.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, STANDARD_COLUMNS, Column
from penstock.store.client.lease import Lease
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.store.errors import TooLarge, WrongType
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from penstock.store.spec import StageSpec
from tests.store.players import group, leased, response
from tests.store.visitors import WAYS, remote_nodes, serve, until, visit_by

KB = 1000
SIZE = 100 * KB
"""Bytes of a picture."""
G = 4
SPEC: dict[str, Any] = {
    "columns": (*STANDARD_COLUMNS.values(), Column("screens", "binary", "list")),
    "source_columns": (*PROMPT_COLUMNS, "pictures", "picture_ranges"),
    "stages": (
        StageSpec("rollout", "group", ("prompt_ids", "pictures"), (*ROLLOUT_COLUMNS, "screens")),
        StageSpec("reward", "sample", ("pictures", "picture_ranges", "screens"), ("reward",)),
        StageSpec("train", "batch", ("pictures", "screens", "response_ids", "reward"), ()),
    ),
    "group_size": G,
}


def picture(number: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(number).bytes(size)


def with_picture(number: int, size: int = SIZE) -> dict[str, Any]:
    return group(number) | {"pictures": [picture(number, size), b"small"], "picture_ranges": [0, 1, 1, 1]}


def check(rows: Rows, size: int = SIZE) -> None:
    """Each row has its group's pictures, which lie in memory once."""
    found = rows.blobs("pictures")
    expected = {group: [picture(group, size), b"small"] for group in set(rows.group_ids.tolist())}
    assert [list(map(bytes, some)) for some in found] == [expected[group] for group in rows.group_ids.tolist()]
    addresses = {np.frombuffer(large, np.uint8).__array_interface__["data"][0] for large, _ in found}
    assert len(addresses) == len(expected)


def sampled(rows: Rows, screens: list[list[bytes]]) -> dict[str, Any]:
    return response(len(rows)) | {"screens": screens}


async def write_screens(client: StoreClient, lease: Lease) -> list[list[bytes]]:
    """Write what a rollout saw: the first screen is the same in all rows, another in the rows of each half."""
    rows = lease.rows.row_ids.tolist()
    screens = [[picture(100), bytes(picture(101 + row % 2))] for row in rows]
    await client.write(lease, rows, sampled(lease.rows, screens))
    return screens


def files_bytes(store: Store) -> int:
    assert store.segments is not None
    return sum(segment.nbytes for segment in store.segments.book.segments.values() if segment.state.name == "LIVE")


@pytest.mark.parametrize("way", WAYS)
def test_a_picture_is_kept_sent_and_read_once_for_the_rows_of_its_group(tmp_path: Path, way: str) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by(way, store, endpoint)
        await client.put_groups([with_picture(number) for number in range(2)])
        assert 2 * SIZE < files_bytes(store) < 2 * SIZE + 10 * KB
        rollout = await leased(client, "rollout")
        check(rollout.rows)
        screens = await write_screens(client, rollout)
        assert 3 * SIZE < files_bytes(store) - 2 * SIZE < 3 * SIZE + 20 * KB  # three distinct screens
        assert store.segments is not None
        before = store.segments.rows.sent_bytes
        lease = await leased(client, "reward")
        assert len(lease.rows) == 2 * G
        check(lease.rows)
        assert [list(map(bytes, some)) for some in lease.rows.blobs("screens")] == screens
        assert lease.rows.lists("picture_ranges") == [[0, 1, 1, 1]] * 2 * G
        sent = store.segments.rows.sent_bytes - before
        assert sent <= 5 * SIZE + 20 * KB
        assert (sent > 5 * SIZE) == (way == "tcp")

    serve(tmp_path, body, **SPEC)


def test_small_pictures_travel_inline_once_a_group(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("tcp", store, endpoint)
        await asyncio.gather(*(client.put_groups([with_picture(number, 500)]) for number in range(4)))
        assert files_bytes(store) == 0
        check((await leased(client, "rollout")).rows, 500)
        assert 4 * 500 < store.blocks.bytes < 4 * 500 + 2 * KB

    serve(tmp_path, body, **SPEC)


def test_a_picture_is_freed_with_the_last_row_of_its_group(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("socket", store, endpoint)
        await client.put_groups([with_picture(number) for number in range(3)])
        for left in (3, 2, 1):
            lease = await leased(client, "rollout", 1)
            check(lease.rows)
            for row in lease.rows.row_ids:
                assert left * SIZE < files_bytes(store) < left * (SIZE + 5 * KB)
                await client.drop(lease, [row], "test")
            del lease
        assert files_bytes(store) == 0  # once its reader is done with it, too

    serve(tmp_path, body, **SPEC)


def test_pictures_beyond_the_budget_are_read_from_disk(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("socket", store, endpoint)
        await client.put_groups([with_picture(number) for number in range(4)])
        assert store.segments is not None
        assert store.segments.book.spilled_bytes > 2 * SIZE
        check((await leased(client, "rollout")).rows)

    serve(tmp_path, body, shared_bytes=2 * SIZE, **SPEC)


def test_a_restored_store_has_the_pictures_once(tmp_path: Path) -> None:
    taken: list[list[list[bytes]]] = []
    size = 40 * KB

    async def before(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("socket", store, endpoint)
        await client.put_groups([with_picture(number) for number in range(4)])
        lease = await leased(client, "rollout", 2)
        taken.append(await write_screens(client, lease))
        await client.drop(await leased(client, "rollout", 1), range(2 * G, 3 * G), "test")
        path = Path(await client.snapshot(str(tmp_path / "snapshots"), 1))
        assert 3 * SIZE < (path / "source.arrow").stat().st_size < 3 * SIZE + size
        assert 3 * SIZE < (path / "rows-0.arrow").stat().st_size < 3 * SIZE + size

    async def after(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("tcp", store, endpoint)
        assert 6 * SIZE < files_bytes(store) < 6 * SIZE + size
        lease = await leased(client, "reward")
        check(lease.rows)
        assert [list(map(bytes, some)) for some in lease.rows.blobs("screens")] == taken[0]
        check((await leased(client, "rollout")).rows)

    serve(tmp_path / "one", before, **SPEC)
    serve(tmp_path / "two", after, restore=str(tmp_path / "snapshots"), **SPEC)


def test_a_large_snapshot_is_restored_in_parts_that_are_freed_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("socket", store, endpoint)
        await client.put_groups([with_picture(number) for number in range(4)])
        monkeypatch.setattr("penstock.store.service.snapshot.BYTES_PER_BATCH", 2 * SIZE + 10 * KB)
        await client.snapshot(str(tmp_path / "snapshots"), 1)

    async def after(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("socket", store, endpoint)
        lease = await leased(client, "rollout", 2)
        check(lease.rows)
        await client.drop(lease, lease.rows.row_ids, "test")
        assert 2 * SIZE < files_bytes(store) < 2 * SIZE + 10 * KB

    serve(tmp_path / "one", before, **SPEC)
    serve(tmp_path / "two", after, restore=str(tmp_path / "snapshots"), **SPEC)


Body = Callable[[Store, StoreClient, StoreClient], Awaitable[None]]


def on_two_nodes(tmp_path: Path, body: Body) -> None:
    """`body(store, engine, trainer)`: clients on nodes b and c. The store's is a."""
    remote, nodes = remote_nodes(tmp_path, "bc")

    async def served(store: Store, endpoint: Endpoint) -> None:
        try:
            await body(store, StoreClient(endpoint, node="b"), StoreClient(endpoint, node="c"))
        finally:
            for node in remote.values():
                await asyncio.to_thread(node.close)

    on_two_nodes.remote = remote  # type: ignore[attr-defined]
    serve(tmp_path, served, node="a", nodes=nodes, **SPEC)


def test_between_nodes_a_picture_travels_once_a_group(tmp_path: Path) -> None:
    async def body(store: Store, engine: StoreClient, trainer: StoreClient) -> None:
        await engine.put_groups([with_picture(number) for number in range(2)])
        screens = await write_screens(engine, await leased(engine, "rollout"))
        server = on_two_nodes.remote["b"].server  # type: ignore[attr-defined]
        before = server.sent_bytes
        lease = await leased(trainer, "reward", G)
        check(lease.rows)
        assert [list(map(bytes, some)) for some in lease.rows.blobs("screens")] == screens[:G]
        assert SIZE + 3 * SIZE < server.sent_bytes - before < SIZE + 3 * SIZE + 10 * KB  # of one of the groups

    on_two_nodes(tmp_path, body)


def test_pictures_of_turns_are_made_again_when_their_node_is_lost(tmp_path: Path) -> None:
    async def body(store: Store, engine: StoreClient, trainer: StoreClient) -> None:
        await trainer.put_groups([with_picture(0)])
        await engine.put_groups([with_picture(1)])
        await write_screens(engine, await leased(engine, "rollout"))
        await store.lost("b")
        stats = await trainer.stats()
        assert stats["dropped/node_lost"] == G  # whose prompt was there
        assert stats["lost/rollout"] == G
        again = await leased(trainer, "rollout")
        assert set(again.rows.group_ids.tolist()) == {0}
        screens = await write_screens(trainer, again)
        lease = await leased(trainer, "reward")
        check(lease.rows)
        assert [list(map(bytes, some)) for some in lease.rows.blobs("screens")] == screens

    on_two_nodes(tmp_path, body)


def test_groups_that_cannot_be_encoded_leave_nothing_behind(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit_by("socket", store, endpoint)
        await client.put_groups([with_picture(0)])
        lease = await leased(client, "rollout")
        await client.drop(lease, lease.rows.row_ids, "test")
        del lease
        await until(lambda: files_bytes(store) == 0)
        await client.stats()  # hears that the file came back
        bad = with_picture(2) | {"pictures": ["a path"]}
        with pytest.raises(WrongType, match="column 'pictures', row 2: got str, where bytes are due"):
            await client.put_groups([with_picture(0), with_picture(1), bad])
        with pytest.raises(TooLarge):
            await client.put_groups([with_picture(0), with_picture(1, 3 * SIZE)])
        assert await client.put_groups([with_picture(1)]) == [1]

    serve(tmp_path, body, max_bytes=2 * SIZE, **SPEC)
