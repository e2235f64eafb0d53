"""Warm workers differ in what processes that were started one by one would differ in."""

import subprocess
from collections.abc import Sequence

ID = "from ray._raylet import UniqueID; print(UniqueID.from_random().hex())"


def test_forks_draw_different_ids(warm_python: Sequence[str]) -> None:
    """Ray names tasks and objects by them, and ends a process that is sent two tasks of one name."""
    drawn = [subprocess.run([*warm_python, "-c", ID], capture_output=True, check=True).stdout for _ in range(2)]
    assert drawn[0] != drawn[1]
