"""Ranks that meet on this machine, each in a process of its own."""

import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from penstock.workers.trainer.ranks import Meeting

ROOT = Path(__file__).parents[1]


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    *words: object,
    timeout_s: float = 900,
    statuses: Sequence[int] | None = None,
) -> None:
    """`command RANK NUM_RANKS ADDRESS *words`, once a rank. Asserts that all of them end well, or with `statuses`."""
    with closing(Meeting("127.0.0.1")) as meeting:
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks), meeting.address, *map(str, words)],
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(num_ranks)
        ]
        errors = [process.communicate(timeout=timeout_s)[1] for process in processes]
    expected = [0] * num_ranks if statuses is None else list(statuses)
    assert [process.returncode for process in processes] == expected, "\n".join(errors)
