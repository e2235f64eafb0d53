"""A save that outlives its deadline is nobody's any more: it can neither free nor spoil nor seal the next one.

A pipe in the place of a rank's file holds a save up: it is full, and nobody reads it.
"""

import fcntl
import os
import struct
import sys
import termios
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.conf.errors import CheckpointError, DeadlineExceeded
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.checkpointing.saver import Saver
from penstock.workers.trainer.checkpointing.shard_files import file_of, load
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece
from tests.rank_processes import run_ranks

NUM_ELEMENTS = 50_000
"""More than a pipe holds."""


def holding(value: float) -> list[Piece]:
    return [Piece("w", (NUM_ELEMENTS,), 0, torch.full((NUM_ELEMENTS,), value))]


class HeldUp:
    """A rank's file that takes the beginning of what is written, and no more until `let_go`."""

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self.path = directory / file_of(rank)
        directory.mkdir(parents=True, exist_ok=True)
        os.mkfifo(self.path)
        self.reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_until_full(self) -> None:
        while not struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, bytes(4)))[0]:
            time.sleep(0.001)

    def let_go(self) -> None:
        os.close(self.reader)


def late(ranks: Ranks, tmp_path: Path) -> tuple[Saver, HeldUp]:
    """A saver whose first save has missed its deadline and is still being written, and what holds it."""
    saver = Saver(ranks, timeout_s=60)
    held = HeldUp(tmp_path / "global_step_1" / "trainer")
    assert saver.begin(holding(1.0), str(held.path.parent))
    held.wait_until_full()
    saver.timeout_s = 0.01
    with pytest.raises(DeadlineExceeded, match="did not finish writing"):
        saver.finish()
    saver.timeout_s = 60
    return saver, held


def test_a_save_holds_the_hosts_copy_alone_while_it_writes(ranks: Ranks, tmp_path: Path) -> None:
    """Tensors of the device that it still held would be there when an engine wakes up."""
    saver, held = Saver(ranks, timeout_s=60), HeldUp(tmp_path)
    pieces = holding(1.0)
    storage = weakref.ref(pieces[0].values.untyped_storage())
    assert saver.begin(pieces, str(tmp_path))
    del pieces
    held.wait_until_full()
    saver.wait_until_copied()
    assert storage() is None
    held.let_go()
    with pytest.raises(CheckpointError):
        saver.finish()


def test_no_save_begins_while_an_earlier_one_still_holds_the_copy(ranks: Ranks, tmp_path: Path) -> None:
    saver, held = late(ranks, tmp_path)
    assert not saver.begin(holding(2.0), str(tmp_path / "global_step_2" / "trainer"))
    held.let_go()
    assert saver.is_free(60)
    assert not (tmp_path / "global_step_2").exists()


def test_a_late_save_removes_what_it_wrote_and_makes_room_for_the_next(ranks: Ranks, tmp_path: Path) -> None:
    saver, held = late(ranks, tmp_path)
    held.let_go()
    assert saver.is_free(60)
    assert not (tmp_path / "global_step_1").exists()
    directory = str(tmp_path / "global_step_2" / "trainer")
    assert saver.begin(holding(2.0), directory)
    assert saver.finish()
    (found,) = pieces = holding(0.0)
    load(pieces, directory, ranks)
    assert bool((found.values == 2.0).all())


def test_what_others_wrote_beside_a_late_save_stays(ranks: Ranks, tmp_path: Path) -> None:
    saver, held = late(ranks, tmp_path)
    (held.path.parent / file_of(1)).write_text("another rank's")
    held.let_go()
    assert saver.is_free(60)
    assert [path.name for path in held.path.parent.iterdir()] == [file_of(1)]


def test_nobody_waits_for_the_copy_of_a_save_that_was_given_up(ranks: Ranks, tmp_path: Path) -> None:
    saver, held = late(ranks, tmp_path)
    waited = saver.waited_s
    saver.wait_until_copied()
    assert saver.waited_s - waited < 30
    held.let_go()
    assert saver.is_free(60)


def test_a_save_that_nobody_asked_for_is_given_up_by_the_next(ranks: Ranks, tmp_path: Path) -> None:
    saver = Saver(ranks, timeout_s=60)
    held = HeldUp(tmp_path / "1")
    assert saver.begin(holding(1.0), str(held.path.parent))
    held.wait_until_full()
    assert not saver.begin(holding(2.0), str(tmp_path / "2"))
    with pytest.raises(CheckpointError, match="given it up"):
        saver.finish()
    held.let_go()
    assert saver.is_free(60)
    assert not held.path.parent.exists()


def one_of_two(rank: int, num_ranks: int, address: str, place: Path) -> None:
    """The first save of rank 1 is held up."""
    ranks = Ranks.join(TrainerConfig(), rank, num_ranks, address)
    saver = Saver(ranks, timeout_s=60)
    half = [replace(piece, shape=(2, NUM_ELEMENTS), first=rank * NUM_ELEMENTS) for piece in holding(1.0)]
    held = HeldUp(place / "1", rank) if rank == 1 else None
    ranks.barrier()
    assert saver.begin(half, str(place / "1"))
    if held is not None:
        held.wait_until_full()
    ranks.barrier()
    saver.timeout_s = 0.01
    with pytest.raises(DeadlineExceeded):
        saver.finish()
    saver.timeout_s = 60
    assert not saver.begin(half, str(place / "2"))
    if held is not None:
        held.let_go()
    assert saver.is_free(60)
    ranks.barrier()
    assert saver.begin(half, str(place / "3"))
    assert saver.finish()
    ranks.barrier()
    found = replace(half[0], values=torch.zeros(NUM_ELEMENTS))
    load([found], str(place / "3"), ranks)
    assert bool((found.values == 1.0).all())
    ranks.leave()


@pytest.mark.real
def test_no_rank_begins_while_one_of_them_still_holds_its_copy(tmp_path: Path, warm_python: list[str]) -> None:
    run_ranks([*warm_python, "-m", "tests.workers.trainer.checkpointing.test_late_saves"], 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3"]


if __name__ == "__main__":
    one_of_two(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
