"""A control group for each fence, where this process may make one: all its memory together, and its processes.

Version 1 and 2. Below the group that this process is in, so that limits that others have set hold too. Where none can
be made (a container whose /sys/fs/cgroup is read-only), `usage.py` stands in for it.
"""

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock.workers.sandbox.limits import MIB, Limits

NAME = "penstock-sandbox"
KEEPER_BYTES = 32 * MIB
KEEPER_PROCESSES = 4
REMOVE_S = 1.0
"""For killed processes to be gone; a group that still has some cannot be removed."""
_numbers = itertools.count()


class Cgroup:
    """Directories of one group, one for each hierarchy. Lifecycle: `around` a process, `remove`."""

    def __init__(self, directories: list[Path], events: Path) -> None:
        self.directories = directories
        self.events = events

    @classmethod
    def make(cls, limits: Limits) -> "Cgroup | None":
        """None where that cannot be."""
        name = f"{NAME}-{os.getpid()}-{next(_numbers)}"
        made: list[Path] = []
        try:
            for parent, settings in _hierarchies(limits):
                _sweep(parent)
                directory = parent / name
                directory.mkdir()
                made.append(directory)
                for file, value in settings.items():
                    (directory / file).write_text(str(value))
        except OSError:
            cls(made, Path()).remove()
            return None
        events = (
            [path for path in (made[0] / "memory.events", made[0] / "memory.oom_control") if path.exists()]
            if made
            else []
        )
        return cls(made, events[0]) if events else None

    @classmethod
    def around(cls, pid: int, limits: Limits) -> "Cgroup | None":
        """A group with this process in it. None where that cannot be."""
        group = cls.make(limits)
        if group is not None:
            try:
                group.add(pid)
            except OSError:
                group.remove()
                return None
        return group

    def add(self, pid: int) -> None:
        """The process, and all that it starts from now on. Raises `OSError`."""
        for directory in self.directories:
            (directory / "cgroup.procs").write_text(str(pid))

    def num_killed(self) -> int:
        """Processes that the kernel ended because the group's memory was used up."""
        with suppress(OSError):
            for line in self.events.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        deadline = time.monotonic() + REMOVE_S
        for directory in self.directories:
            while not _removed(directory) and time.monotonic() < deadline:
                time.sleep(0.002)


def _hierarchies(limits: Limits) -> Iterator[tuple[Path, dict[str, int]]]:
    """Where to make a group and what to set there, memory first. Raises `OSError` if there is no such place."""
    memory = limits.memory_bytes + KEEPER_BYTES
    processes = limits.num_processes + KEEPER_PROCESSES
    version_1, version_2 = _own_group("memory"), _own_group("")
    if version_1 is not None:
        yield version_1, {"memory.limit_in_bytes": memory}
        pids = _own_group("pids")
        if pids is not None:
            yield pids, {"pids.max": processes}
    elif version_2 is not None:
        with suppress(OSError):  # only a group without processes may; else its parent must have done it
            (version_2 / "cgroup.subtree_control").write_text("+memory +pids")
        yield version_2, {"memory.max": memory, "memory.swap.max": 0, "pids.max": processes}


def _own_group(controller: str) -> Path | None:
    """The directory of this process's group in the hierarchy of a controller; of version 2 if it has no name."""
    path = next((path for names, path in _memberships() if controller in names.split(",")), None)
    mount = next(
        (place for root, place, kind, options in _mounts() if _is_of(controller, kind, options) and root == "/"), None
    )
    return None if path is None or mount is None else Path(mount + path)


def _memberships() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        yield names, path


def _mounts() -> Iterator[tuple[str, str, str, str]]:
    """Root, place, type and options of each mount."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, second = line.partition(" - ")
        words, more = first.split(), second.split()
        yield words[3], words[4], more[0], more[-1]


def _is_of(controller: str, kind: str, options: str) -> bool:
    return controller in options.split(",") if controller and kind == "cgroup" else not controller and kind == "cgroup2"


def _sweep(parent: Path) -> None:
    """Remove groups of processes that are gone."""
    for directory in parent.glob(f"{NAME}-*"):
        owner = int(directory.name.split("-")[2])
        if not Path(f"/proc/{owner}").exists():
            _removed(directory)


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
