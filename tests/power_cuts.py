"""What a disk may have after a power cut, at each moment of what a test does below a directory.

    with recorded(tmp_path) as disk:
        ...                       # os.fsync, os.rename, os.unlink, … are seen, whoever calls them
        disk.promise(2)           # from this moment on
    for promised, place in disk.after_power_cuts():
        ...                       # what the next process finds

A synced file has its bytes, and a synced directory its names. Of everything later any part may have been lost: each
name is as it was or as it is, and a file has all its bytes, none, or zeros.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

STEPS = ("fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir")
Tree = dict[str, bytes | None]
"""Bytes of each file, by path; None for a directory."""
Names = dict[int, dict[str, int]]
"""The inode of each name, by the inode of its directory."""


@dataclass
class Disk:
    root: Path
    num_mixtures: int
    """Number of random losses at each moment, beside those of everything, all bytes and nothing."""
    found: dict[tuple[Any, ...], tuple[Any, Tree]] = field(default_factory=dict)
    num_moments: int = 0
    promised: Any = 0
    _names: Names = field(default_factory=dict)
    _bytes: dict[int, bytes] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)
    """Descriptor of each inode that was ever seen, whose number is then given to no other."""
    _directories: set[int] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.RLock)
    _random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        names, contents = self._look()
        self._names, self._bytes = names, contents

    def promise(self, what: Any) -> None:
        """Note what the next process is to find if the power is cut from now on."""
        with self._lock:
            self.promised = what
            self._note()

    def step(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock:
            result = call(*arguments, **options)
            if "sync" in call.__name__:
                self._sync(arguments[0])
            self._note()
            return result

    def after_power_cuts(self) -> Iterator[tuple[Any, Path]]:
        """What was promised, and a directory with what is there."""
        for promised, tree in self.found.values():
            with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
                for name, content in tree.items():
                    if content is None:
                        Path(place, name).mkdir()
                    else:
                        Path(place, name).write_bytes(content)
                yield promised, Path(place)

    def _sync(self, descriptor: int) -> None:
        number = os.fstat(descriptor).st_ino
        names, contents = self._look()
        self._names |= {number: names[number]} if number in names else {}
        self._bytes |= {number: contents[number]} if number in contents else {}

    def _note(self) -> None:
        """Note all that may be found after a cut at this moment."""
        self.num_moments += 1
        names, contents = self._look()
        everything = {**dict.fromkeys(contents, b""), **self._bytes}
        self._add(self._tree(self._names, everything))
        self._add(self._tree(names, everything))
        self._add(self._tree(names, contents))
        for _ in range(self.num_mixtures):
            self._add(self._tree(self._mixed(names), self._with_some_bytes(contents)))

    def _mixed(self, names: Names) -> Names:
        found: Names = {}
        for directory in names.keys() | self._names.keys():
            now, before = names.get(directory, {}), self._names.get(directory, {})
            chosen = {name: self._random.choice((now, before)).get(name) for name in sorted({*now, *before})}
            found[directory] = {name: number for name, number in chosen.items() if number is not None}
        return found

    def _with_some_bytes(self, contents: dict[int, bytes]) -> dict[int, bytes]:
        some = {}
        for number in sorted(contents.keys() | self._bytes.keys()):
            now = contents.get(number, self._bytes.get(number, b""))
            before = self._bytes.get(number)
            lost = [b"", bytes(len(now))] if before is None else [before]
            some[number] = self._random.choice([now, *lost])
        return some

    def _add(self, tree: Tree) -> None:
        key = (repr(self.promised), *sorted(tree.items(), key=lambda item: item[0]))
        self.found.setdefault(key, (self.promised, tree))

    def _tree(self, names: Names, contents: dict[int, bytes]) -> Tree:
        found: Tree = {}

        def add(directory: int, path: str) -> None:
            for name, number in names.get(directory, {}).items():
                found[path + name] = None if number in self._directories else contents.get(number, b"")
                if number in self._directories:
                    add(number, f"{path}{name}/")

        add(self.root.stat().st_ino, "")
        return found

    def _look(self) -> tuple[Names, dict[int, bytes]]:
        """Names and bytes of now."""
        names: Names = {}
        contents: dict[int, bytes] = {}
        for folder, _, files in os.walk(self.root):
            with contextlib.suppress(FileNotFoundError):  # other threads write meanwhile
                self._directories.add(self._number(folder))
                names[self._number(folder)] = {entry.name: self._number(entry.path) for entry in os.scandir(folder)}
                for name in files:
                    path = os.path.join(folder, name)
                    contents[self._number(path)] = Path(path).read_bytes()
        return names, contents

    def _number(self, path: str) -> int:
        number = os.stat(path).st_ino
        if number not in self._open:
            self._open[number] = os.open(path, os.O_RDONLY)
        return number

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


@contextlib.contextmanager
def recorded(root: Path, num_mixtures: int = 2) -> Iterator[Disk]:
    """See what is done below a directory; what it has already is on the disk."""
    disk = Disk(root, num_mixtures)
    with pytest.MonkeyPatch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, _seen(disk, getattr(os, name)))
        try:
            yield disk
        finally:
            disk.close()


def _seen(disk: Disk, call: Callable[..., Any]) -> Callable[..., Any]:
    def seen(*arguments: Any, **options: Any) -> Any:
        return disk.step(call, *arguments, **options)

    return seen
