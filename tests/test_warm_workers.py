"""Warm workers differ in what processes that were started one by one would differ in."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.warm_workers import STARTED
from tests.warm_workers import warm_python as started

pytestmark = pytest.mark.real

ID = "from ray._raylet import UniqueID; print(UniqueID.from_random().hex())"


def test_forks_draw_different_ids(warm_python: Sequence[str]) -> None:
    """Ray names tasks and objects by them, and ends a process that is sent two tasks of one name."""
    drawn = [subprocess.run([*warm_python, "-c", ID], capture_output=True, check=True).stdout for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_processes_of_a_test_run_share_what_they_are_forked_from(warm_python: Sequence[str]) -> None:
    """The kernel places a process's memory at random: two forks have a package at the same address because both are of
    the process that has imported it, whoever their parents are by now."""
    again = started(Path(warm_python[0]).parent, os.getpid())
    places = [
        subprocess.run([*command, "-c", "import torch; print(id(torch))"], capture_output=True, check=True).stdout
        for command in (warm_python, [str(again)])
    ]
    assert places[0] == places[1]


def test_the_death_of_the_server_is_told_as_such(tmp_path: Path) -> None:
    """Whoever is refused later would be taken for the cause."""
    command = started(tmp_path / "warm", os.getpid(), modules=["json"])
    STARTED[-1].kill()
    while subprocess.run([command, "-c", ""], capture_output=True, check=False).returncode == 0:
        pass
    done = subprocess.run([command, "-c", ""], capture_output=True, check=False, text=True)
    assert "the server of warm workers has been killed" in done.stderr
