"""A script in a small file system of its own, to see what happens when it is full."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_in_tmpfs(script: str, directory: Path, instead: str, python: Sequence[str] = (sys.executable,)) -> str:
    """Run a Python script whose first argument is `directory`, with 8 MiB mounted there for it alone; what it printed.

    Asserts that it ends well. Skips where the container forbids mounts; `instead`: what tests the same there. `python`:
    `warm_python` for scripts that import torch.
    """
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip(f"this container may not mount a tmpfs: {instead}")
    mount = f'mount -t tmpfs -o size=8m none {directory} && exec {" ".join(python)} -c "$0" {directory}'
    command = ["unshare", "-rm", "sh", "-c", mount, script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout
