"""The files of a directory, by content, so that a node can tell whether it has the same ones, at any path.

It is made on the driver's machine for files that actors on other nodes are to read: a model, a checkpoint, a user's
code.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import xxhash

from penstock.workers.files import SavedFile, saved_file

HASHING_THREADS = 4


@dataclass(frozen=True)
class FileSet:
    """Files below one directory. Their names are relative to it, with `/` between folders."""

    files: tuple[SavedFile, ...]

    @classmethod
    def of_directory(cls, directory: Path) -> "FileSet":
        """Make a set of all files of a model or checkpoint. Raises `OSError`."""
        return cls._of(directory, (path for path in directory.rglob("*") if path.is_file()))

    @classmethod
    def of_code(cls, file: Path) -> "FileSet":
        """Make a set of a Python file and what it may import from beside it: the other files of its folder, and
        packages there."""
        folder = file.parent
        packages = [path.parent for path in folder.glob("*/__init__.py")]
        return cls._of(folder, {*folder.glob("*.py"), *(path for one in packages for path in one.rglob("*.py"))})

    @classmethod
    def _of(cls, directory: Path, paths: Iterable[Path]) -> "FileSet":
        with ThreadPoolExecutor(HASHING_THREADS) as threads:
            return cls(tuple(threads.map(lambda path: _named(directory, path), sorted(paths))))

    @cached_property
    def address(self) -> str:
        """The id of the content, equal for equal content: xxh3-128 of names, sizes and checksums, hexadecimal."""
        digest = xxhash.xxh3_128()
        for file in self.files:
            digest.update(f"{file.name}\0{file.num_bytes}\0{file.checksum}\n".encode())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def lies_in(self, directory: Path) -> bool:
        """Return whether every file is there with the same content; others may lie beside them."""
        try:
            if any(os.stat(directory / file.name).st_size != file.num_bytes for file in self.files):
                return False
            with ThreadPoolExecutor(HASHING_THREADS) as threads:
                found = threads.map(lambda file: _named(directory, directory / file.name), self.files)
                return all(one == file for one, file in zip(found, self.files, strict=True))
        except OSError:
            return False


def _named(directory: Path, path: Path) -> SavedFile:
    file = saved_file(path)
    return SavedFile(path.relative_to(directory).as_posix(), file.num_bytes, file.checksum)
