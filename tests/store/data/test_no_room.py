"""Shared memory and disks that are full, as file systems are: a batch goes elsewhere or is refused, none is damaged."""

from pathlib import Path

import pytest

from tests.tmpfs import run_in_tmpfs

pytestmark = pytest.mark.real

INSTEAD = "test_segments.py has refusals of other kinds only"
COMMON = """
import asyncio, sys, tempfile
from pathlib import Path
import numpy as np
import pyarrow as pa
from penstock.store.data.segment_files import Arena
from penstock.store.errors import StoreError
from penstock.store.data.segment_files import SegmentMappings
from penstock.store.data.segments import Segments
from tests.store.visitors import files_in

MB = 2**20
small = Path(sys.argv[1])  # 8 MiB

def batch(num_mb, fill):
    return pa.record_batch({"x": pa.array(np.full(num_mb * MB // 4, fill, np.int32))})

def segments_and_arena(shm, disk, max_bytes):
    segments = Segments(str(shm), str(disk), max_bytes)
    segments.add_client("w", lambda: None)
    places = (str(shm), str(disk))
    return segments, Arena(places, "w"), SegmentMappings(places, lambda: None)

def refused(call, *arguments):
    try:
        call(*arguments)
    except (StoreError, OSError) as error:
        return str(error)
    raise SystemExit(f"{call} found room")

def check(mappings, placed, fill):
    assert (mappings.read(placed).column(0).to_numpy() == fill).all()
"""


def run(body: str, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    script = f"{COMMON}\nwith tempfile.TemporaryDirectory(dir={str(tmp_path)!r}) as folder:\n    large = Path(folder)\n"
    indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
    assert run_in_tmpfs(f'{script}{indented}\nprint("to the end")', mount, INSTEAD) == "to the end\n"


def test_what_shared_memory_has_no_room_for_is_written_to_disk(tmp_path: Path) -> None:
    body = """
segments, arena, mappings = segments_and_arena(small / "shm", large / "disk", 64 * MB)
first = arena.place(batch(5, 1))
segments.adopt(first)
second = arena.place(batch(5, 2))  # fits in part
segments.adopt(second)
assert (files_in(small / "shm"), files_in(large / "disk")) == (["w-0"], ["w-1"])
check(mappings, first, 1)
check(mappings, second, 2)
segments.end(first.segment)
arena.take_back(segments.notice("w").recycled)
assert arena.reserve(20 * MB) is None  # a file that came back, and cannot grow
slot = arena.reserve(5 * MB)
assert slot.size >= 5 * MB  # nor is it lost by that
third = arena.place(batch(5, 3), slot)
segments.adopt(third)
check(mappings, third, 3)
check(mappings, second, 2)
"""
    run(body, tmp_path)


def test_what_a_full_disk_does_not_take_is_refused_and_what_lies_there_stays(tmp_path: Path) -> None:
    body = """
segments, arena, mappings = segments_and_arena(large / "shm", small / "disk", 1 * MB)
first, second = arena.place(batch(5, 1)), arena.place(batch(5, 2))
segments.adopt(first)
said = refused(segments.adopt, second)
assert "No space left on device" in said and "store.spill_dir" in said, said
assert (files_in(large / "shm"), files_in(small / "disk")) == ([], ["w-0"])
assert (segments.book.bytes, segments.book.spilled_bytes) == (0, 5 * MB)
assert segments.notice("w").removed == ["w-0", "w-1"]
check(mappings, first, 1)
segments.end(first.segment)
mappings.forget([first.segment])  # as its reader does when it hears of it
third = arena.place(batch(5, 3))
segments.adopt(third)  # now there is room
assert (files_in(large / "shm"), files_in(small / "disk")) == ([], ["w-2"])
check(mappings, third, 3)
"""
    run(body, tmp_path)


def test_a_batch_without_room_is_refused_by_the_keys_that_mend_it(tmp_path: Path) -> None:
    """The store goes on."""
    body = """
from tests.store.driver import make_spec
from tests.store.invariants import check_invariants
from tests.store.visitors import visit
from penstock.store.service.store import Store

async def main():
    spec = make_spec(group_size=1, inline_bytes=1000)
    store = Store(spec, segments=Segments(str(small / "shm"), str(small / "disk"), 64 * MB))
    client, _ = await visit(await store.endpoint())

    def prompts(num_mb, fill):
        return [{"prompt_ids": np.full(num_mb * MB // 4, fill, np.int32), "task": "{}"}]

    await client.put_groups(prompts(4, 1))
    for _ in range(3):
        try:
            await client.put_groups(prompts(5, 2))
        except StoreError as error:
            assert "fit neither" in str(error) and "store.spill_dir" in str(error), error
        else:
            raise SystemExit("9 MiB fitted")
    assert len(files_in(small / "shm")) == 1 and not files_in(small / "disk")
    await client.put_groups(prompts(3, 3))
    for fill in (1, 3):
        lease = await client.lease("rollout", 1, "engine")
        assert (lease.rows.arrays("prompt_ids")[0] == fill).all()
    check_invariants(store.ledger)
    await store.end()
    assert not list(small.iterdir())

asyncio.run(asyncio.wait_for(main(), 60))
"""
    run(body, tmp_path)
