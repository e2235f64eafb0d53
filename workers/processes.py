"""The identity of a run's processes by more than their number, which another process may have by the time that it is
used: an actor says who it is, and its node's agent ends no other process.
"""

import contextlib
import os
import time
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import psutil

from penstock.store.data.roots import identity

END_S = 10.0
"""Seconds for a killed process to be gone: its memory, on a GPU too, is given back only then."""


@dataclass(frozen=True)
class ProcessId:
    """The identity of a process. Plain data, so that it can be sent through Ray."""

    pid: int
    proof: tuple[str, ...]
    """Time when it started, and its PID namespace and machine."""

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        return cls(pid, identity(pid))

    @classmethod
    def told(cls, said: Any) -> "ProcessId | None":
        """Convert what an actor's `process` has answered; the store, which does not know this class, answers with a
        tuple. None: there is no answer."""
        return said if isinstance(said, cls) else cls(*said) if isinstance(said, tuple) else None

    @classmethod
    def own(cls) -> "ProcessId":
        return cls.of(os.getpid())

    @property
    def is_alive(self) -> bool:
        """True if the process is alive. False also where it cannot be seen from: on another machine, in another
        container."""
        return identity(self.pid) == self.proof


def kill(process: ProcessId, timeout_s: float = END_S) -> bool:
    """End a process and all that it has started, at once. False if any of them is still there afterwards: the kernel
    does not end one that waits for a device."""
    doomed = _with_children(process.pid)
    if not process.is_alive:  # asked last: the children are its own
        return True
    ids = [ProcessId.of(member.pid) for member in doomed]
    for member in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()  # which asks again whether it is the same process
    deadline = time.monotonic() + timeout_s
    while (left := any(member.is_alive for member in ids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def children() -> frozenset[psutil.Process]:
    """Processes that this one has started, and those that they have."""
    return frozenset(_with_children(os.getpid())[1:])


def end_children(but: Set[psutil.Process] = frozenset()) -> int:
    """End what users' code has left: this process's children, with theirs. `but`: children that were there before that
    code, which belong to others. Returns the number of ended ones."""
    left = children() - but
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    return len(left)


def _with_children(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
