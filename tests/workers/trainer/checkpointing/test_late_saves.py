"""A save that outlives its deadline is nobody's any more: it can neither free nor spoil nor seal the next one.

A pipe in the place of a rank's file holds a save up for as long as nobody reads it: its writer waits in `open`.
"""

import os
from pathlib import Path

import pytest
import torch

from penstock.conf.errors import CheckpointError, DeadlineExceeded
from penstock.workers.trainer.checkpointing.reading import load
from penstock.workers.trainer.checkpointing.saver import Saver
from penstock.workers.trainer.checkpointing.shard_files import file_of
from penstock.workers.trainer.engines.engine import Piece
from penstock.workers.trainer.process_group import ProcessGroup

NUM_ELEMENTS = 1_000


@pytest.fixture
def group() -> ProcessGroup:
    return ProcessGroup.join(0, 1, None, 60, False)


def holding(value: float) -> list[Piece]:
    return [Piece("w", (NUM_ELEMENTS,), 0, torch.full((NUM_ELEMENTS,), value))]


def held_up(directory: Path) -> Path:
    directory.mkdir(parents=True)
    os.mkfifo(directory / file_of(0))
    return directory / file_of(0)


def read_to_its_end(pipe: Path) -> bytes:
    with pipe.open("rb") as reader:
        return reader.read()


def late(group: ProcessGroup, tmp_path: Path) -> tuple[Saver, Path]:
    """A saver whose first save has missed its deadline and is still being written; the pipe that holds it."""
    saver = Saver(group, timeout_s=0.1)
    pipe = held_up(tmp_path / "global_step_1" / "trainer")
    assert saver.begin(holding(1.0), str(pipe.parent))
    saver.wait_until_copied()
    with pytest.raises(DeadlineExceeded, match="did not finish writing"):
        saver.finish()
    return saver, pipe


def test_no_save_begins_while_an_earlier_one_still_holds_the_copy(group: ProcessGroup, tmp_path: Path) -> None:
    saver, pipe = late(group, tmp_path)
    assert not saver.begin(holding(2.0), str(tmp_path / "global_step_2" / "trainer"))
    read_to_its_end(pipe)
    assert saver.is_free(30)
    assert not (tmp_path / "global_step_2").exists()


def test_a_late_save_removes_what_it_wrote_and_makes_room_for_the_next(group: ProcessGroup, tmp_path: Path) -> None:
    saver, pipe = late(group, tmp_path)
    read_to_its_end(pipe)
    assert saver.is_free(30)
    assert not (tmp_path / "global_step_1").exists()
    directory = str(tmp_path / "global_step_2" / "trainer")
    saver = Saver(group, timeout_s=60)
    assert saver.begin(holding(2.0), directory)
    assert saver.finish()
    (found,) = pieces = holding(0.0)
    load(pieces, directory, group)
    assert bool((found.values == 2.0).all())


def test_what_others_wrote_beside_a_late_save_stays(group: ProcessGroup, tmp_path: Path) -> None:
    saver, pipe = late(group, tmp_path)
    (pipe.parent / file_of(1)).write_text("another rank's")
    read_to_its_end(pipe)
    assert saver.is_free(30)
    assert [path.name for path in pipe.parent.iterdir()] == [file_of(1)]


def test_nobody_waits_for_the_copy_of_a_save_that_was_given_up(group: ProcessGroup, tmp_path: Path) -> None:
    saver, pipe = late(group, tmp_path)
    waited = saver.waited_s
    saver.wait_until_copied()
    assert saver.waited_s - waited < 0.1
    read_to_its_end(pipe)


def test_a_save_that_nobody_asked_for_is_given_up_by_the_next(group: ProcessGroup, tmp_path: Path) -> None:
    saver = Saver(group, timeout_s=60)
    pipe = held_up(tmp_path / "1")
    assert saver.begin(holding(1.0), str(pipe.parent))
    assert not saver.begin(holding(2.0), str(tmp_path / "2"))
    with pytest.raises(CheckpointError, match="given it up"):
        saver.finish()
    read_to_its_end(pipe)
    assert saver.is_free(30)
    assert not pipe.parent.exists()
