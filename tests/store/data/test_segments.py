"""Files of large batches: nobody's are overwritten, none is orphaned, and none is kept for a reader that has ended."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.store.data import segment_book
from penstock.store.data import segments as segments_module
from penstock.store.data.codec import SegmentRef
from penstock.store.data.segment_book import POOLED_SHARE, Instructions
from penstock.store.data.segment_files import (
    SHARE,
    SPARE_BYTES,
    SPARES,
    Arena,
    SegmentMappings,
    map_file,
    num_spares,
    preallocate,
)
from penstock.store.data.segments import Intake, Segments
from penstock.store.errors import StoreClosed, StoreError, UnknownColumn, WrongType
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from tests.store.driver import make_spec
from tests.store.players import leased
from tests.store.visitors import files_in, remote_nodes, serve, until, visit

KB = 1000
BUDGET = 100 * KB


def batch(num_bytes: int, fill: int = 0) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(np.full(num_bytes, fill, np.uint8))})


def segments_in(tmp_path: Path, max_bytes: int = BUDGET) -> Segments:
    return Segments(str(tmp_path / "shm"), str(tmp_path / "disk"), max_bytes)


def arena_of(segments: Segments, writer: str = "writer") -> Arena:
    segments.add_client(writer, lambda: None)
    return Arena((str(segments.directory), str(segments.spill)), writer)


@pytest.mark.parametrize("taken", ["shm", "disk"])
def test_a_directory_that_exists_is_another_stores_and_refused(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).mkdir()
    (tmp_path / taken / "writer-0").write_bytes(b"theirs")
    with pytest.raises(StoreError, match=rf"cannot make .*{taken}.*File exists.*set store\.spill_dir"):
        segments_in(tmp_path)
    assert (tmp_path / taken / "writer-0").read_bytes() == b"theirs"
    assert [path.name for path in tmp_path.iterdir()] == [taken]


def test_a_name_that_leads_out_of_the_directory_is_no_segment(tmp_path: Path) -> None:
    """What the store has adopted, it removes."""
    segments = segments_in(tmp_path)
    placed = arena_of(segments).place(batch(5 * KB))
    (tmp_path / "writer-9").write_bytes(bytes(10 * KB))
    with pytest.raises(StoreError, match="is no name of a file"):
        segments.adopt(replace(placed, segment="../writer-9"))
    assert (tmp_path / "writer-9").exists()


def test_a_file_that_exists_is_not_written_over_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "writer-0").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        Arena([str(tmp_path)], "writer").place(batch(5 * KB))
    assert (tmp_path / "writer-0").read_bytes() == b"theirs"


def test_writers_share_the_preallocated_files(tmp_path: Path) -> None:
    """None is taken twice, and small batches take none."""
    preallocate(str(tmp_path), 2 * SHARE * SPARE_BYTES)
    assert [(tmp_path / f"spare-{number}").stat().st_size for number in range(2)] == 2 * [SPARE_BYTES]
    one, two, third = (Arena([str(tmp_path)], name) for name in ("one", "two", "third"))
    assert one.reserve(SPARE_BYTES // 8 - 1) is None
    slots = [arena.reserve(SPARE_BYTES // 2) for arena in (one, two, third)]
    assert [slot and slot.name for slot in slots] == ["one-0", "two-0", None]
    assert one.reserve(SPARE_BYTES // 2) is None
    assert files_in(tmp_path) == ["one-0", "two-0"]


def test_a_batch_in_a_preallocated_file_is_read_as_any(tmp_path: Path) -> None:
    preallocate(str(tmp_path), SHARE * SPARE_BYTES)
    arena = Arena([str(tmp_path)], "writer")
    sent = pa.record_batch({"x": pa.array(np.arange(SPARE_BYTES // 8, dtype=np.int32))})
    placed = arena.place(sent, arena.reserve(SPARE_BYTES // 2 + KB))
    assert SegmentMappings([str(tmp_path)], lambda: None).read(placed).equals(sent)
    arena.take_back([placed.segment])
    again = arena.reserve(SPARE_BYTES // 2)
    assert again is not None
    assert again.name == placed.segment


def test_files_are_preallocated_as_far_as_there_is_room(tmp_path: Path) -> None:
    preallocate(str(tmp_path / "missing"), 2**30)
    preallocate(str(tmp_path), SHARE * SPARE_BYTES)
    preallocate(str(tmp_path), SHARE * SPARE_BYTES)  # of another store, in the directory of an agent
    assert [file.name for file in tmp_path.iterdir()] == ["spare-0"]


@given(max_bytes=st.integers(0, 2**40), free=st.integers(0, 2**40))
def test_what_is_preallocated_is_a_share_of_budget_and_free_memory(max_bytes: int, free: int) -> None:
    count = num_spares(max_bytes, free)
    assert 0 <= count <= SPARES
    assert SHARE * count * SPARE_BYTES <= min(max_bytes, free)
    assert count == SPARES or SHARE * (count + 1) * SPARE_BYTES > min(max_bytes, free)


def test_what_is_moved_to_disk_does_not_overwrite_what_lies_there(tmp_path: Path) -> None:
    segments = segments_in(tmp_path, max_bytes=5 * KB)
    (tmp_path / "disk" / "writer-0").write_bytes(b"theirs")
    with pytest.raises(StoreError, match=r"writer-0 cannot be moved to .*disk"):
        segments.adopt(arena_of(segments).place(batch(10 * KB)))
    assert (tmp_path / "disk" / "writer-0").read_bytes() == b"theirs"


def test_a_file_that_cannot_be_moved_goes_back_to_its_writer_or_away(tmp_path: Path) -> None:
    segments = segments_in(tmp_path)
    arena = arena_of(segments)
    segments.adopt(arena.place(batch(95 * KB)))
    held = segments.book.bytes
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    for size in (BUDGET // POOLED_SHARE + KB, BUDGET // POOLED_SHARE - KB):
        with pytest.raises(StoreError, match="cannot be moved"):
            segments.adopt(arena.place(batch(size)))
    notice = segments.notice("writer")
    assert notice is not None
    assert (notice.removed, notice.recycled) == (["writer-1"], ["writer-2"])
    assert files_in(tmp_path / "shm") == ["writer-0", "writer-2"]
    assert (segments.book.bytes, segments.book.spilled_bytes) == (held, 0)


def test_a_slot_is_its_writers_until_what_lies_in_it_has_a_place(tmp_path: Path) -> None:
    """If no place has room for the rest of a batch, the batch goes by value, out of the slot."""
    arena = Arena([str(tmp_path)], "writer")
    arena.take_back([arena.place(batch(5 * KB)).segment])
    slot = arena.reserve(5 * KB)  # and a few more: files grow in steps
    assert slot is not None
    room = slot.take(5 * KB)
    assert room is not None
    lies_there = pa.Array.from_buffers(pa.uint8(), 5 * KB, [None, pa.py_buffer(room)])
    rest = pa.array(np.zeros(5 * KB, np.int64))
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    with pytest.raises(OSError, match="No such file"):
        arena.place(pa.record_batch({"x": lies_there, "y": rest, "z": rest}), slot)
    assert arena.reserve(1) is None


def test_all_who_have_ever_mapped_a_file_hear_that_it_is_gone(tmp_path: Path) -> None:
    """A mapping of an earlier batch in the same file holds its pages as well."""
    segments = segments_in(tmp_path)
    arena = arena_of(segments)
    segments.add_client("reader", lambda: None)
    first = arena.place(batch(5 * KB))
    segments.adopt(first)
    segments.book.begin_reading("reader", first.segment)
    segments.end_readings("reader", [first.segment])
    segments.end(first.segment)
    arena.take_back([first.segment])
    second = arena.place(batch(5 * KB), arena.reserve(5 * KB))
    assert second.segment == first.segment
    segments.book.max_bytes = 1 * KB
    segments.adopt(second)  # is moved to disk
    notice = segments.notice("reader")
    assert notice is not None
    assert notice.removed == [first.segment]


DIES = """
import os, signal, sys
from penstock.store.data.segments import Segments
Segments(sys.argv[1] + "/penstock-dead", sys.argv[2] + "/penstock-dead", 1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.real
def test_what_a_killed_store_left_is_swept_by_the_next_one_beside_it(tmp_path: Path) -> None:
    """Files in memory and on disk are swept."""
    places = [tmp_path / "shm", tmp_path / "disk"]
    killed = subprocess.run([sys.executable, "-c", DIES, *map(str, places)])
    assert killed.returncode == -signal.SIGKILL
    assert all((place / "penstock-dead").exists() for place in places)
    living = Segments(*(str(place / "penstock-living") for place in places), BUDGET)
    assert all(os.listdir(place) == ["penstock-living"] for place in places)
    living.close()
    assert not any(os.listdir(place) for place in places)


@pytest.mark.parametrize("lacking", [0, 1])
def test_where_one_of_several_batches_cannot_be_read_none_is_held(tmp_path: Path, lacking: int) -> None:
    async def main() -> None:
        segments = segments_in(tmp_path)
        arena = arena_of(segments)
        numbers = pa.record_batch({"x": pa.array(np.zeros(KB, np.int32))})
        placed = [arena.place(numbers) for _ in range(2)]
        for one in placed:
            segments.adopt(one)
        (tmp_path / "shm" / placed[lacking].segment).rename(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match=f"segment {placed[lacking].segment} "), segments.held(placed):
            pytest.fail("one of them is nowhere")
        while any(+segment.uses for segment in segments.book.segments.values()):
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_batch_whose_note_makes_no_sense_leaves_nobody_else_held(tmp_path: Path) -> None:
    """One that lies on another node, leased together with it."""

    async def main() -> None:
        remote, nodes = remote_nodes(tmp_path, "b")
        segments = Segments(str(tmp_path / "shm"), str(tmp_path / "disk"), BUDGET, nodes)
        segments.add_client("writer", lambda: None)
        segments.add_client("other", lambda: None, "b")
        numbers = pa.record_batch({"x": pa.array(np.zeros(KB, np.int32))})
        wrong = replace(arena_of(segments).place(numbers), columns=(("x", "list<item: int32>", ((0, 8), (0, 8))),))
        elsewhere = SegmentRef("other-0", 0, 1, (("x", "int32", ((0, 4),)),), 10, "b")
        for placed in (wrong, elsewhere):
            segments.adopt(placed)
        with pytest.raises(ValueError, match="buffer is smaller"), segments.held([wrong, elsewhere]):
            pytest.fail("its note makes no sense")
        while any(+segment.uses for segment in segments.book.segments.values()):
            await asyncio.sleep(0.005)
        segments.close()
        for node in remote.values():
            node.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_large_files_are_removed_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[tuple[int, bool]] = []

    def remove(*files: Path) -> None:
        removed.append((len(files), threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(segments_module, "_remove", remove)
    monkeypatch.setattr(segments_module, "REMOVED_HERE", 100 * KB)
    segments = segments_in(tmp_path, 10 * BUDGET)
    arena = arena_of(segments)
    for num_kb in (5, 60):
        placed = [arena.place(batch(num_kb * KB)) for _ in range(2)]
        for one in placed:
            segments.adopt(one)
        segments._carry_out(Instructions(removed=[(one.segment, False) for one in placed]))
    segments._file_thread.close()
    segments._carry_out(Instructions(removed=[(one.segment, False) for one in placed]))  # they go with the store
    assert removed == [(2, True), (2, False)]
    with pytest.raises(StoreClosed):
        segments._file_thread.begin(lambda: None)


class Leaving:
    """A writer of a hundred files that leaves its store: half of them have come back to it, rows lie in the others."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.removed: Counter[str] = Counter()
        monkeypatch.setattr(segments_module, "_remove", self._remove)
        monkeypatch.setattr(segment_book, "AT_ONCE", 8)
        self.segments = segments_in(tmp_path, 10 * BUDGET)
        arena = arena_of(self.segments)
        self.placed = [arena.place(batch(100)) for _ in range(100)]
        for one in self.placed:
            self.segments.adopt(one)
        self.end(self.placed[:50])

    def end(self, some: list[SegmentRef]) -> None:
        for one in some:
            self.segments.end(one.segment)

    def _remove(self, *files: Path) -> None:
        self.removed.update(file.name for file in files)
        for file in files:
            file.unlink(missing_ok=True)


def test_others_are_served_while_a_client_leaves_and_its_files_go_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        case = Leaving(tmp_path, monkeypatch)
        segments, turns = case.segments, 0
        leaving = asyncio.create_task(segments.left("writer"))
        while not leaving.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 3:
                case.end(case.placed[50:])
        assert turns > 100 / 8
        while segments._unclaimed_task is not None:
            await asyncio.sleep(0.005)
        assert case.removed == Counter(one.segment for one in case.placed)
        assert files_in(tmp_path / "shm") == []
        assert not segments.book.segments
        segments.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_store_that_closes_while_a_client_leaves_takes_all_files_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        case = Leaving(tmp_path, monkeypatch)
        leaving = asyncio.create_task(case.segments.left("writer"))
        await asyncio.sleep(0)
        assert not leaving.done()
        before = case.removed.total()
        case.segments.close()
        await leaving
        assert case.removed.total() == before
        assert case.segments._unclaimed_task is None
        assert not (tmp_path / "shm").exists()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    ("name", "kind", "refusal"),
    [("prompt_ids", "decimal", (WrongType, "decimal")), ("nobody", "int32", (UnknownColumn, "'nobody'"))],
)
def test_a_batch_that_is_not_in_the_dataflow_is_refused_and_its_file_goes_back(
    tmp_path: Path, name: str, kind: str, refusal: tuple[type[StoreError], str]
) -> None:
    segments = segments_in(tmp_path)
    placed = replace(arena_of(segments).place(batch(5 * KB)), columns=((name, kind, ((0, 8),)),))
    with pytest.raises(refusal[0], match=refusal[1]):
        Intake(make_spec(), segments).block(placed, 5 * KB)
    notice = segments.notice("writer")
    assert notice is not None
    assert notice.recycled == [placed.segment]
    assert segments.book.bytes == 0


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_segments_that_are_written_and_read_keep_no_file_open(tmp_path: Path) -> None:
    """A process may have a thousand files open, and many more segments."""
    arena, mappings = Arena([str(tmp_path)], "writer"), SegmentMappings([str(tmp_path)], lambda: None)
    before = open_files()
    numbers = pa.record_batch({"x": pa.array(np.arange(KB, dtype=np.int32))})
    placed = [arena.place(numbers) for _ in range(20)]
    read = [mappings.read(one) for one in placed]
    assert open_files() == before
    arena.take_back(one.segment for one in placed[:10])
    slots = [arena.reserve(4 * KB) for _ in range(10)]
    again = [arena.place(numbers, slot) for slot in slots]
    assert open_files() == before
    assert {one.segment for one in again} == {one.segment for one in placed[:10]}
    assert all(batch.equals(numbers) for batch in [*read, *map(mappings.read, again)])


def test_pages_go_with_the_last_array_that_lies_in_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcd" * KB)
    with (tmp_path / "file").open("rb") as file:
        array = map_file(file.fileno(), 2 * KB)
    view = array[4:8].view(np.uint8)
    del array
    assert mapped(tmp_path) == [str(tmp_path / "file")]
    assert bytes(view) == b"abcd"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    del view
    assert mapped(tmp_path) == []
    with pytest.raises(OSError, match="cannot be mapped"), (tmp_path / "empty").open("wb+") as file:
        map_file(file.fileno())


def mapped(place: Path) -> list[str]:
    """Files of a directory that some memory of this process lies in, removed ones too."""
    return [line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if f" {place}/" in line]


def test_a_reader_that_calls_nothing_more_holds_no_shared_memory(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        producer, _ = await visit(endpoint)
        reader, _ = await visit(endpoint)
        await producer.put_groups([{"prompt_ids": [7] * 5000, "task": "{}"}])
        lease = await leased(reader, "rollout", 1, "engine")
        array = lease.rows.arrays("prompt_ids")[0]
        await reader.drop(lease, lease.rows.row_ids, "test")
        del lease
        await asyncio.sleep(0.1)
        assert files_in(tmp_path / "shm"), "somebody reads it"
        assert (array == 7).all()
        del array
        await until(lambda: not files_in(tmp_path / "shm"))
        await until(lambda: not mapped(tmp_path / "shm"))

    serve(tmp_path, body, shared_bytes=100_000, group_size=1)


def test_a_reader_that_calls_nothing_more_hears_that_a_file_is_gone(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        producer, _ = await visit(endpoint)
        reader, _ = await visit(endpoint)
        await producer.put_groups([{"prompt_ids": [7] * 5000, "task": "{}"}])
        lease = await leased(reader, "rollout", 1, "engine")
        await reader.release(lease)
        del lease
        again = await leased(producer, "rollout", 1, "other")
        await producer.drop(again, again.rows.row_ids, "test")
        del again
        await until(lambda: not files_in(tmp_path / "shm") and not mapped(tmp_path / "shm"))

    serve(tmp_path, body, shared_bytes=100_000)


def test_the_store_itself_lets_go_of_what_its_snapshot_has_read(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, _ = await visit(endpoint)
        await client.put_groups([{"prompt_ids": [7] * 5000, "task": "{}"}])
        await client.cut()
        lease = await leased(client, "rollout", 1, "engine")
        await client.drop(lease, lease.rows.row_ids, "test")
        del lease
        await client.snapshot(str(tmp_path / "snapshots"), 1)
        await until(lambda: not files_in(tmp_path / "shm") and not mapped(tmp_path / "shm"))

    serve(tmp_path, body, shared_bytes=100_000)
