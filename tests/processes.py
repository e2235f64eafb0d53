"""The ends of processes that are nobody's here, so that they cannot be waited for."""

import time
from collections.abc import Iterable

from penstock.workers.runtime.processes import ProcessId

GONE_S = 300.0
"""Deadline of what must come, and comes at once on a machine that is not busy."""
ENDED = "0"
"""When a process has started, as its proof says it, that had ended by then."""


def seen(pids: Iterable[int]) -> list[ProcessId]:
    """Those of them that live, and no others that have their numbers later."""
    return [process for process in map(ProcessId.of, pids) if process.proof[1] != ENDED]


def wait_until_gone(processes: Iterable[ProcessId]) -> None:
    """Zombies count as gone: the first process of a machine, or of a container, reaps them, or nobody does."""
    deadline, left = time.monotonic() + GONE_S, list(processes)
    while left := [process for process in left if process.is_alive]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)
