"""Large batches as files in shared memory: written once by their producer, mapped by every consumer, the store's own.

A producer writes the file into the store's directory and names it in its call; from then on the store decides when it
goes, so a producer that dies takes nothing along. What exceeds the budget of shared memory is moved to disk, where it
is mapped all the same: rows that came last are needed last. Pages that a consumer has mapped stay valid for it after
the file is gone.
"""

import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from penstock.store.errors import StoreError


class Segments:
    """The files of one store. `directory`: in shared memory; `spill`: on disk."""

    def __init__(self, directory: str, spill: str, max_bytes: int) -> None:
        self.directory, self.spill = Path(directory), Path(spill)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self.bytes = 0
        """In shared memory."""
        self.spilled_bytes = 0
        """On disk."""
        self._sizes: dict[str, tuple[int, bool]] = {}
        """Name -> bytes, and whether it is on disk."""
        self._numbers = itertools.count()

    def keep(self, batch: pa.RecordBatch) -> str:
        """Write a batch that has come by value; its name."""
        name = f"store{os.getpid()}-{next(self._numbers)}"
        write_segment(str(self.directory), name, batch)
        return name

    def adopt(self, name: str) -> pa.RecordBatch:
        """A file that a producer has written is the store's from now on. Raises `StoreError` if it is none."""
        file = self.directory / name
        try:
            size = file.stat().st_size
            if self.bytes + size > self.max_bytes:
                self.spill.mkdir(parents=True, exist_ok=True)
                shutil.move(file, self.spill / name)
                self.spilled_bytes += size
            else:
                self.bytes += size
            self._sizes[name] = (size, not file.exists())
            return self.open(name)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"segment {name} of {self.directory} cannot be read: {error}.") from None

    def open(self, name: str) -> pa.RecordBatch:
        return read_segment((str(self.directory), str(self.spill)), name)

    def drop(self, name: str) -> None:
        """Nobody will ask for it again."""
        size, on_disk = self._sizes.pop(name)
        if on_disk:
            self.spilled_bytes -= size
        else:
            self.bytes -= size
        with suppress(OSError):
            ((self.spill if on_disk else self.directory) / name).unlink()

    def forget_client(self, client: str) -> None:
        """Remove what a dead producer wrote and never handed over."""
        for file in self.directory.glob(f"{client}-*"):
            if file.name not in self._sizes:
                with suppress(OSError):
                    file.unlink()

    def close(self) -> None:
        for place in (self.directory, self.spill):
            shutil.rmtree(place, ignore_errors=True)


def write_segment(directory: str, name: str, batch: pa.RecordBatch) -> None:
    """One copy, into fresh pages of the file."""
    with pa.OSFile(os.path.join(directory, name), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_segment(places: tuple[str, ...], name: str) -> pa.RecordBatch:
    """The batch, mapped: nothing is read before it is used. Raises `StoreError` if it is in none of the places."""
    for place in places:
        with suppress(FileNotFoundError):
            return pa.ipc.open_stream(pa.memory_map(os.path.join(place, name))).read_next_batch()
    raise StoreError(f"segment {name} is in none of {', '.join(places)}: its rows have ended, or the store has.")
