"""Whoever could not write is told how much room there was, where that may be why."""

import shutil
from pathlib import Path

from penstock.workers.runtime.local_files import FreeSpace


def test_room_is_told_where_it_may_be_too_little(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    space = FreeSpace(2 * free)
    space.measure(tmp_path / "not" / "made" / "yet")
    told = space.shortage_text("Make room.")
    assert told.startswith(f". Its part alone needs {2 * free:,} bytes, and ")
    assert told.endswith(" were free. Make room.")


def test_it_is_not_told_where_there_was_plenty_or_nobody_has_looked(tmp_path: Path) -> None:
    space = FreeSpace(1)
    space.measure(tmp_path)
    assert space.shortage_text("Make room.") == ""
    assert FreeSpace(2**60).shortage_text("Make room.") == ""


def test_a_place_that_cannot_be_seen_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    space = FreeSpace(2**60)
    space.measure(tmp_path / "loop" / "below")
    assert "1,152,921,504,606,846,976 bytes" in space.shortage_text("")
