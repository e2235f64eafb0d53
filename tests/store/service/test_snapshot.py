"""Snapshots: the run goes on from one as if nothing had happened, and a damaged one is refused by its file's name."""

import asyncio
import json
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from penstock.store.client.store_client import StoreClient
from penstock.store.data import block_index, durable
from penstock.store.errors import CorruptSnapshot, LeaseExpired, StoreError
from penstock.store.service import snapshot as snapshot_module
from penstock.store.service.snapshot import snapshot_files, snapshots
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from tests.power_cuts import recorded
from tests.store.driver import make_spec
from tests.store.invariants import check_invariants
from tests.store.players import Served, group, leased, start_workers, train, values_of, work

SPEC = make_spec(max_active_groups=8, max_staleness=3)


def run(body: Callable[[Store, StoreClient], Awaitable[None]], spec: StoreSpec = SPEC, **options: Any) -> None:
    async def main() -> None:
        store = Store(spec, **options)
        await asyncio.wait_for(body(store, StoreClient(store)), 30)
        check_invariants(store.ledger)
        await store.close("test over")

    asyncio.run(main())


async def half_way(store: Store, client: StoreClient) -> None:
    """Eight groups: two trained, one in training, some with responses, some leased, some rows dropped."""
    await client.put_groups([group(number) for number in range(8)])
    for stage, units in (("rollout", 6), ("reward", 100), ("reference", 100), ("group_advantage", 3)):
        lease = await leased(client, stage, units, stage)
        await client.write(lease, lease.rows.row_ids, values_of(stage, lease))
    await train(client, 0)
    lease = await leased(client, "group_advantage", 1, "compute")
    await client.drop(lease, lease.rows.row_ids[:1], "test")
    await client.release(lease)
    lease = await leased(client, "group_advantage", 1, "compute")
    await client.write(lease, lease.rows.row_ids, values_of("group_advantage", lease))
    assert await client.lease_shared("train", 1, 0, 1) is not None  # formed, and never acknowledged
    assert await client.lease("rollout", 1, "engine") is not None  # held for ever


def test_every_file_is_known_by_what_was_to_be_in_it(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        path = Path(await client.snapshot(str(tmp_path), 1))
        known = snapshot_files(path)
        assert known.keys() == {file.name for file in path.iterdir()}
        for name, (num_bytes, checksum) in known.items():
            data = (path / name).read_bytes()
            assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (num_bytes, checksum)

    run(body)


async def finish(store: Store, client: StoreClient, rounds: range) -> list[dict[str, Any]]:
    """Everything that the trainer sees from here on."""
    workers = start_workers(store, Served(store.ledger.rounds.formed))
    batches = [(await train(client, round))[0].rows for round in rounds]
    await client.close()
    await asyncio.gather(*workers)
    return [{name: batch.table().column(name).to_pylist() for name in batch.names} for batch in batches]


def test_a_restored_store_goes_on_where_the_snapshot_was_taken(tmp_path: Path) -> None:
    expected: list[dict[str, Any]] = []
    counters: dict[str, int] = {}

    async def before(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        path = await client.snapshot(str(tmp_path), 1)
        assert Path(path) == tmp_path / "snapshot-00000001"
        counters.update(store.ledger.counters)
        # The store itself goes on undisturbed, once the update in training is given up like in the restored one.
        for lease in list(store.ledger.residents.leases.held):
            await store.release(lease)
        expected.extend(await finish(store, client, range(1, 3)))

    async def after(store: Store, client: StoreClient) -> None:
        check_invariants(store.ledger)
        assert store.ledger.rounds.formed == 1
        assert store.ledger.counters == counters
        assert not store.ledger.residents.leases.held
        assert await finish(store, client, range(1, 3)) == expected

    run(before)
    run(after, restore=tmp_path)
    assert len(expected) == 2


def test_a_lease_from_before_is_told_that_it_is_over(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(number) for number in range(4)])
        late = await leased(client, "rollout", 1, "engine")
        await client.snapshot(str(tmp_path), 0)
        restored = Store(SPEC, restore=tmp_path)
        again = StoreClient(restored)
        lease = await leased(again, "rollout", 1, "other")
        assert lease.id != late.id
        with pytest.raises(LeaseExpired):
            await again.write(late, late.rows.row_ids, values_of("rollout", late))
        check_invariants(restored.ledger)

    run(body)


def test_other_numbers_of_consumers_and_ranks_go_on_from_it(tmp_path: Path) -> None:
    async def before(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        await client.snapshot(str(tmp_path), 0)

    async def after(store: Store, client: StoreClient) -> None:
        serves = Served(1)
        workers = start_workers(store, serves) + [
            asyncio.ensure_future(work(StoreClient(store), "rollout", f"engine-{index}", serves, 1))
            for index in range(5)
        ]
        rows = [lease.rows.row_ids.tolist() for lease in await train(client, 1, num_ranks=3)]
        assert sum(map(len, rows)) == 3  # a row of the first group was dropped
        assert len(await train(client, 2, num_ranks=2)) == 2
        await client.close()
        await asyncio.gather(*workers)

    run(before)
    run(after, restore=tmp_path)


def test_the_store_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        rows = store.ledger.residents.num_rows
        writing = asyncio.ensure_future(client.snapshot(str(tmp_path), 7))
        await asyncio.sleep(0)
        for lease in list(store.ledger.residents.leases.held):
            await store.release(lease)
        await finish(store, client, range(1, 2))
        await writing
        assert Store(SPEC, restore=tmp_path).ledger.residents.num_rows == rows

    run(body)


def test_a_cut_is_of_its_moment_however_slowly_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte what is written of a store that stands still."""
    monkeypatch.setattr(snapshot_module, "SLICE", 1)

    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        still = snapshot_files(await client.snapshot(str(tmp_path / "still"), 1))
        await client.cut()
        for lease in list(store.ledger.residents.leases.held):
            await store.release(lease)
        await finish(store, client, range(1, 3))
        assert store.ledger.residents.num_rows == 4
        assert snapshot_files(await client.snapshot(str(tmp_path / "moving"), 1)) == still
        assert not store.ledger.residents.watchers
        await client.cut()
        await client.cut()  # takes the place of the one before
        assert len(store.ledger.residents.watchers) == 1
        there = store.blocks.num_blocks
        await client.snapshot(str(tmp_path / "moving"), 2)
        assert store.blocks.num_blocks == there
        for group_id in list(store.ledger.residents.groups):
            store.blocks.free(group_id, store.ledger.residents.all_rows)
        assert store.blocks.num_blocks == 0, "a snapshot has kept some"

    run(body)


def test_a_cancelled_caller_does_not_take_the_values_from_under_its_snapshot(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        writing = asyncio.ensure_future(client.snapshot(str(tmp_path), 1))
        await asyncio.sleep(0)
        writing.cancel()
        while not snapshots(tmp_path):
            await asyncio.sleep(0.005)
        assert Store(SPEC, restore=tmp_path).ledger.residents.num_rows == store.ledger.residents.num_rows

    run(body)


def test_the_newest_are_kept_and_the_newest_is_restored(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        for number in range(1, 5):
            await client.put_groups([group(number)])
            await client.snapshot(str(tmp_path), number, keep=2)
        assert [path.name for path in snapshots(tmp_path)] == ["snapshot-00000004", "snapshot-00000003"]
        assert Store(SPEC, restore=tmp_path).ledger.residents.next_group == 4
        assert not list(tmp_path.glob(".*"))

    run(body)


def damage(kind: str, file: Path) -> None:
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["groups.arrow", "source.arrow", "rows-0.arrow"])
@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_a_damaged_snapshot_is_refused_by_name_and_the_one_before_is_offered(
    tmp_path: Path, kind: str, name: str
) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        for number in (1, 2):
            await client.snapshot(str(tmp_path), number)
        damage(kind, tmp_path / "snapshot-00000002" / name)
        with pytest.raises(CorruptSnapshot, match=rf"{name} .*The one before is .*snapshot-00000001"):
            Store(SPEC, restore=tmp_path)
        assert Store(SPEC, restore=tmp_path / "snapshot-00000001").ledger.rounds.formed == 1
        shutil.rmtree(tmp_path / "snapshot-00000001")
        with pytest.raises(CorruptSnapshot, match="There is none before it"):
            Store(SPEC, restore=tmp_path)

    run(body)


def test_a_manifest_names_no_files_of_others(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        await client.snapshot(str(tmp_path), 1)
        manifest = tmp_path / "snapshot-00000001" / "manifest.json"
        found = json.loads(manifest.read_text())
        (tmp_path / "loose").write_bytes((manifest.parent / "groups.arrow").read_bytes())
        found["files"]["../loose"] = found["files"]["groups.arrow"]
        manifest.write_text(json.dumps(found))
        with pytest.raises(CorruptSnapshot, match=r"manifest\.json names a file that is none of it: '\.\./loose'"):
            Store(SPEC, restore=tmp_path)

    run(body)


def test_a_manifest_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "snapshot-00000001").mkdir()
    manifest = tmp_path / "snapshot-00000001" / "manifest.json"
    for text in ("{", "[]", json.dumps({"files": {}})):
        manifest.write_text(text)
        with pytest.raises(CorruptSnapshot, match=r"manifest\.json is no manifest"):
            Store(SPEC, restore=tmp_path)


def test_a_place_without_snapshots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no snapshot"):
        Store(SPEC, restore=tmp_path)


def test_a_snapshot_of_another_dataflow_is_refused_by_what_differs(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group()])
        await client.snapshot(str(tmp_path), 1)
        with pytest.raises(StoreError, match="its group_size are 2, this run's 3"):
            Store(make_spec(group_size=3), restore=tmp_path)

    run(body)


def test_rows_that_arrow_has_no_room_for_at_once_are_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def before(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        monkeypatch.setattr(block_index, "MAX_ENTRIES", 16)
        await client.snapshot(str(tmp_path), 0)
        monkeypatch.undo()

    async def after(store: Store, client: StoreClient) -> None:
        assert len(await finish(store, client, range(1, 3))) == 2

    run(before)
    run(after, restore=tmp_path)


def test_an_empty_store_has_a_snapshot_too(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.snapshot(str(tmp_path), 0)
        restored = Store(SPEC, restore=tmp_path)
        check_invariants(restored.ledger)
        assert await StoreClient(restored).put_groups([group()]) == [0]

    run(body)


def test_a_snapshot_is_of_the_cut_before_it(tmp_path: Path) -> None:
    async def body() -> None:
        store = Store(make_spec())
        client = StoreClient(store)
        await client.put_groups([group(0)])
        assert await client.cut() == 1
        await client.put_groups([group(1)])
        await client.snapshot(str(tmp_path), 1)
        assert Store(make_spec(), restore=tmp_path).ledger.residents.next_group == 1
        await client.snapshot(str(tmp_path), 2)
        assert Store(make_spec(), restore=tmp_path).ledger.residents.next_group == 2

    asyncio.run(body())


def test_a_snapshot_is_whole_or_missing_whenever_the_power_is_cut(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        for number in (1, 2):
            await client.snapshot(str(tmp_path / "new"), number, keep=1)
            disk.promise(number)

    with recorded(tmp_path) as disk:
        run(body)
    for promised, place in disk.after_power_cuts():
        newest = next((int(path.name.removeprefix("snapshot-")) for path in snapshots(place / "new")), 0)
        assert newest >= promised
        assert not newest or Store(SPEC, restore=place / "new").ledger.residents.next_group == 8


def test_a_late_snapshot_ends_at_its_deadline_and_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, begun, may_go_on, sync = [0.0], threading.Event(), threading.Event(), durable.sync_tree

    def slow(directory: Path) -> None:
        begun.set()
        assert may_go_on.wait(900)
        sync(directory)

    async def body(store: Store, client: StoreClient) -> None:
        await half_way(store, client)
        monkeypatch.setattr(snapshot_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(durable, "sync_tree", slow)
        late = asyncio.ensure_future(client.snapshot(str(tmp_path), 1, timeout_s=900))
        await asyncio.to_thread(begun.wait)
        now[0] = 901.0
        following = asyncio.ensure_future(client.snapshot(str(tmp_path), 1, timeout_s=900))
        await asyncio.sleep(0.05)
        assert len(list(tmp_path.iterdir())) == 1  # nobody else writes there
        may_go_on.set()
        with pytest.raises(StoreError, match="the store's snapshot was given up after 900 s"):
            await late
        path = await following
        assert [str(found) for found in tmp_path.iterdir()] == [path]
        assert Store(SPEC, restore=path).ledger.residents.next_group == store.ledger.residents.next_group

    run(body)


def test_what_a_writer_that_died_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".snapshot-00000001.1234.part"
    left.mkdir()
    (left / "groups.arrow").write_bytes(b"half of it")

    async def body(store: Store, client: StoreClient) -> None:
        path = await client.snapshot(str(tmp_path), 2)
        assert [str(found) for found in tmp_path.iterdir()] == [path]

    run(body)
