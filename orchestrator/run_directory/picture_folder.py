"""The pictures of a run's recorded samples: `pictures/` of its directory, each once, by its content.

    samples/step_N.parquet   pictures: ["3f0c….png", …], a list a row        pictures/3f0c….png   as the model got it

Rows of a prompt name a picture for each mark of their prompt's text. Rows of an environment name the pictures of their
conversation in the order of their first appearance, and its parts count by this order.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.workers.runtime.local_files import replacing

FOLDER = COLUMN = "pictures"
"""Name of the folder, and of the samples' column with the names of what is in there."""
NAME = re.compile(r"[0-9a-f]{32}\.(png|jpg)")
"""Pattern of their names: 16 bytes of BLAKE2b, and the format."""
MOST_BYTES = 1 << 26
"""Largest size of a picture that is read for people."""
_PNG = b"\x89PNG"


class PictureFolder:
    """Lifecycle: `keep` at any time, from one thread at a time, until it `is_full`."""

    def __init__(self, path: Path, most_bytes: float, failed_writes: FailedWrites) -> None:
        """`most_bytes`: largest size of all pictures together."""
        self._path, self._left_bytes, self._failed_writes = path, most_bytes, failed_writes
        self._there: set[str] | None = None
        """Names of the pictures in the folder; None: not listed yet."""
        self.is_full = most_bytes <= 0
        """True once a picture was left out, as all together would be too large."""

    def keep(self, rows: Sequence[Sequence[Any]], *, distinct: bool = False) -> list[list[str | None]]:
        """Keep the pictures of rows. Returns their names; None for one that is not kept. `rows`: encoded pictures, PNG
        or JPEG, as buffers. `distinct`: a row names each of its pictures once."""
        pictures: dict[str, Any] = {}
        names: dict[int, str] = {}
        for picture in (one for row in rows for one in row):
            if id(picture) not in names:  # rows of a group have the same object
                names[id(picture)] = name_of(picture)
                pictures[names[id(picture)]] = picture
        named = [[names[id(picture)] for picture in row] for row in rows]
        with self._failed_writes.tolerating("pictures"):
            self._write(pictures)
        there = self._there or ()
        return [[one if one in there else None for one in (dict.fromkeys(row) if distinct else row)] for row in named]

    def _write(self, pictures: Mapping[str, Any]) -> None:
        """Write those that are not there yet, as long as there is room. Raises `OSError`."""
        if self._there is None:
            self._path.mkdir(exist_ok=True)
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self._path)}
            self._there, self._left_bytes = set(sizes), self._left_bytes - sum(sizes.values())
        for name, picture in pictures.items():
            num_bytes = memoryview(picture).nbytes
            if name in self._there:
                continue
            if num_bytes > self._left_bytes:
                self.is_full = True
                return
            with replacing(self._path / name) as part:
                part.write_bytes(picture)
            self._there.add(name)
            self._left_bytes -= num_bytes


def name_of(picture: Any) -> str:
    """The name of an encoded picture."""
    kind = "png" if bytes(memoryview(picture)[: len(_PNG)]) == _PNG else "jpg"
    return f"{hashlib.blake2b(picture, digest_size=16).hexdigest()}.{kind}"
