"""Ranks that meet on this machine, each in a process of its own."""

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO

from penstock.workers.trainer.ranks import Meeting

ROOT = Path(__file__).parents[1]


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    *words: object,
    timeout_s: float = 900,
    statuses: Sequence[int] | None = None,
) -> None:
    """`command RANK NUM_RANKS ADDRESS *words`, once a rank. Asserts that all of them end well, or with `statuses`.

    A rank that ends otherwise ends the wait: its peers may wait for it for as long as their own deadline.
    """
    expected = [0] * num_ranks if statuses is None else list(statuses)
    with closing(Meeting("127.0.0.1")) as meeting, ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks), meeting.address, *map(str, words)], stderr=errors[rank], cwd=ROOT
            )
            for rank in range(num_ranks)
        ]
        try:
            wait_for(processes, expected, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [process.returncode for process in processes] == expected, "\n".join(map(read, errors))


def wait_for(processes: Sequence[subprocess.Popen[bytes]], expected: Sequence[int], timeout_s: float) -> None:
    """Until all processes have ended, one of them has ended with another status than expected, or time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended = [process.poll() for process in processes]
        if None not in ended or any(status not in (None, right) for status, right in zip(ended, expected, strict=True)):
            return
        time.sleep(0.05)


def read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
