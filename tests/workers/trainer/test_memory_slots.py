"""Two slots in turn: whatever kills a writer, the copies that have a header are whole, and the last one has."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.trainer import memory_slots as slots_module
from penstock.workers.trainer.memory_slots import (
    SLOTS,
    Block,
    Header,
    PieceInfo,
    Slots,
    copied_ranks,
    copied_steps,
    from_json,
    keep_only,
    reserve_slots,
    to_json,
)
from tests.tmpfs import run_in_tmpfs

NUM_BYTES = 64


def header(step: int, rank: int = 0, num_bytes: int = NUM_BYTES) -> Header:
    parts = (PieceInfo("policy/weights/w", "float32", (4, 4), 2, (4, 2)),)
    return Header(step, rank, 2, "a", num_bytes, 0, parts, (Block(num_bytes, "0" * 32),), "{}")


def keep(slots: Slots, step: int) -> int:
    slot = slots.begin(step)
    slots.data(slot).write_bytes(bytes([step]) * NUM_BYTES)
    slots.seal(slot, header(step, slots.rank))
    return slot


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    found = Slots(tmp_path, 0)
    assert reserve_slots(found, NUM_BYTES, 0) is None
    return found


def test_two_slots_take_turns_and_keep_their_files(slots: Slots) -> None:
    files = [slots.data(slot).stat().st_ino for slot in SLOTS]
    assert [keep(slots, step) for step in range(1, 5)] == [0, 1, 0, 1]
    assert copied_steps(slots.root, 0) == [3, 4]
    assert [slots.data(slot).stat().st_ino for slot in SLOTS] == files


def test_a_copy_under_way_is_none_and_the_one_before_is_whole(slots: Slots) -> None:
    for step in (1, 2):
        keep(slots, step)
    slots.begin(3)
    assert copied_steps(slots.root, 0) == [2]
    assert slots.data(slots.copies()[2][0]).read_bytes() == bytes([2]) * NUM_BYTES


def test_a_step_that_is_made_again_replaces_the_first_and_all_after_it(slots: Slots) -> None:
    for step in (4, 5):
        keep(slots, step)
    slots.drop(after=4)
    assert copied_steps(slots.root, 0) == [4]
    keep(slots, 5)
    assert copied_steps(slots.root, 0) == [4, 5]
    slots.begin(4)
    assert copied_steps(slots.root, 0) == []


def test_what_is_no_copy_of_this_rank_does_not_count(slots: Slots) -> None:
    slots.seal(slots.begin(1), header(1, rank=1))
    assert slots.copies() == {}
    slots.seal(slots.begin(1), header(1, num_bytes=NUM_BYTES + 1))
    assert slots.copies() == {}
    (slots.directory / "slot-0.json").write_text("{}")
    assert slots.copies() == {}
    assert copied_steps(slots.root / "nowhere", 0) == []


def test_a_header_comes_back_as_it_was() -> None:
    assert from_json(to_json(header(7)).encode()) == header(7)
    assert from_json(b'{"step": "x"}') is None


@given(st.integers(0, 2**32))
def test_after_any_deaths_the_last_whole_copy_is_there(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A writer that goes on from the newest step, and dies now and then within a copy."""
    chance, slots = random.Random(seed), Slots(tmp_path_factory.mktemp("slots"), 0)
    reserve_slots(slots, NUM_BYTES, 0)
    newest = 0
    for _ in range(12):
        if chance.random() < 0.4:
            slot = slots.begin(newest + 1)
            slots.data(slot).write_bytes(bytes(chance.randrange(NUM_BYTES + 1)))
            assert reserve_slots(slots, NUM_BYTES, 0) is None  # the next writer
        else:
            newest += 1
            keep(slots, newest)
        copies = slots.copies()
        assert max(copies, default=0) == newest
        for step, (slot, _) in copies.items():
            assert slots.data(slot).read_bytes() == bytes([step]) * NUM_BYTES


def test_copies_of_other_ranks_and_later_steps_go(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        for step in (1, 2):
            keep_here = Slots(tmp_path, rank)
            reserve_slots(keep_here, NUM_BYTES, 0)
            keep(keep_here, step)
    assert copied_ranks(tmp_path) == [0, 1, 10]
    keep_only(tmp_path, [0, 10], up_to=1)
    assert copied_ranks(tmp_path) == [0, 10]
    assert [copied_steps(tmp_path, rank) for rank in (0, 1, 10)] == [[1], [], [1]]


def test_files_of_another_size_are_made_fit_and_no_copies_any_more(slots: Slots) -> None:
    keep(slots, 1)
    assert reserve_slots(slots, 2 * NUM_BYTES, 0) is None
    assert slots.copies() == {}
    assert [slots.data(slot).stat().st_size for slot in SLOTS] == [2 * NUM_BYTES] * 2


FULL = """
import sys
from pathlib import Path
from penstock.workers.trainer.memory_slots import reserve_slots
from penstock.workers.trainer.memory_slots import Slots
MIB = 2**20
root = Path(sys.argv[1]) / "states"
for leave, expected in ((0, True), (3 * MIB, False)):
    slots = Slots(root, 0)
    problem = reserve_slots(slots, 3 * MIB, leave)
    assert (problem is None) == expected, problem
    print(problem)
    slots.remove()
first, second = Slots(root, 0), Slots(root, 1)
assert reserve_slots(first, 3 * MIB, MIB) is None
assert reserve_slots(first, 3 * MIB, 8 * MIB) is None, "it has its room"
assert reserve_slots(second, 3 * MIB, MIB) is not None
assert first.data(1).stat().st_blocks * 512 == 3 * MIB
assert not second.directory.exists()
"""


@pytest.mark.real
def test_publications_are_left_their_room(tmp_path: Path) -> None:
    instead = "tests/workers/trainer/test_memory_checkpoint.py asks for more than there is"
    printed = run_in_tmpfs(FULL, tmp_path, instead)
    assert "two copies of 3,145,728 bytes are needed, 8,388,608 of 8,388,608 are free, 3,145,728 of them" in printed
    assert "faults.keep_state=false" in printed


MIB = 2**20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many MiB of memory are free, of 100."""

    def set_free(num_mib: int) -> None:
        monkeypatch.setattr(
            slots_module.psutil, "virtual_memory", lambda: SimpleNamespace(available=num_mib * MIB, total=100 * MIB)
        )

    return set_free


def test_copies_leave_room_for_the_checkpoints_of_all_ranks_of_the_node(
    tmp_path: Path, memory: Callable[[int], None]
) -> None:
    """By hand: two slots of 1 MiB, 3 MiB to publications, 5 MiB of 100 always, and 10 MiB a rank to its checkpoint."""
    first, second = Slots(tmp_path, 0), Slots(tmp_path, 1)
    memory(19)
    problem = reserve_slots(first, MIB, 3 * MIB, save_bytes=10 * MIB)
    assert problem is not None
    assert "and 10,485,760 to checkpoints under way" in problem
    assert not first.directory.exists()
    memory(20)
    assert reserve_slots(first, MIB, 3 * MIB, save_bytes=10 * MIB) is None
    memory(29)
    assert "and 20,971,520 to checkpoints" in str(reserve_slots(second, MIB, 3 * MIB, save_bytes=10 * MIB))
    memory(30)
    assert reserve_slots(second, MIB, 3 * MIB, save_bytes=10 * MIB) is None


def test_slots_that_are_there_go_where_no_checkpoint_could_be_copied(
    slots: Slots, memory: Callable[[int], None]
) -> None:
    memory(15)
    assert reserve_slots(slots, NUM_BYTES, 0, save_bytes=10 * MIB) is None
    memory(14)
    assert reserve_slots(slots, NUM_BYTES, 0) is None
    assert reserve_slots(slots, NUM_BYTES, 0, save_bytes=10 * MIB) is not None
    assert not slots.directory.exists()
