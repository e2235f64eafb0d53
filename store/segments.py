"""The store's side of large batches: which files there are, who reads them, and when they may be written again.

    written ─ adopt ─▶ the store's ─ drop, last use over ─▶ back to its writer, to be written again
                            └─ beyond the budget ─▶ moved to disk          └─ or removed

A producer writes the file (`arena.py`) and names it in its call; from then on the store decides when it goes, so a
producer that dies takes nothing along. What exceeds the budget of shared memory is moved to disk, where it is mapped
all the same: rows that came last are needed last. Used by `store.py` and `server.py`.
"""

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from penstock.store.arena import Arena
from penstock.store.errors import StoreError
from penstock.store.layout import Placed
from penstock.store.mappings import Mappings

POOLED_SHARE = 8
"""One part in so many of the budget may lie idle with the writers, beside what is in use."""
SELF = ""
"""Among the readers: the store itself."""


@dataclass
class Segment:
    """A file that some rows lie in, or somebody still reads."""

    placed: Placed
    nbytes: int
    on_disk: bool
    is_over: bool = False
    """Its last cell has gone."""
    uses: Counter[str] = field(default_factory=Counter)
    """By client: readings that have not ended."""
    seen: set[str] = field(default_factory=set)
    """Clients that have it mapped, perhaps."""


@dataclass
class Notice:
    """What a client hears with the next answer: files that it may write again, and files to forget."""

    recycled: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


class Segments:
    """The files of one store. `directory`: in shared memory; `spill`: on disk."""

    def __init__(self, directory: str, spill: str, max_bytes: int) -> None:
        self.directory, self.spill = Path(directory), Path(spill)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self.bytes = 0
        """In shared memory, in use."""
        self.spilled_bytes = 0
        """On disk."""
        self.pooled_bytes = 0
        """In shared memory, with their writers."""
        self._segments: dict[str, Segment] = {}
        self._pooled: dict[str, int] = {}
        self._writers: dict[str, Notice] = {}
        """Clients that are connected."""
        places = (str(self.directory), str(self.spill))
        self._arena = Arena(places, f"store{os.getpid()}")
        self._mappings = Mappings(places)

    def entered(self, client: str) -> None:
        """It may write and read from now on."""
        self._writers[client] = Notice()

    def keep(self, batch: pa.RecordBatch) -> Placed:
        """Write a batch that has come by value. Raises `StoreError` if there is no room."""
        try:
            return self._arena.place(batch)
        except OSError as error:
            raise StoreError(
                f"{batch.nbytes} bytes fit neither {self.directory} nor {self.spill}: {error}. Lower "
                "store.shared_memory_mib, or set store.spill_dir to a larger disk."
            ) from None

    def adopt(self, placed: Placed) -> None:
        """A file that a producer has written is the store's from now on. Raises `StoreError` if it is none."""
        name = placed.segment
        file = self.directory / name
        on_disk = not file.exists()
        try:
            size = (self.spill / name if on_disk else file).stat().st_size
        except OSError as error:
            raise StoreError(f"segment {name} of {self.directory} cannot be read: {error}.") from None
        self.pooled_bytes -= self._pooled.pop(name, 0)
        if placed.nbytes > size or name in self._segments:
            raise StoreError(f"segment {name} has {size} bytes, not the {placed.nbytes} of its batch, or is in use.")
        if not on_disk and self.bytes + size > self.max_bytes:
            self._move_to_disk(file)
            on_disk = True
        self._segments[name] = Segment(placed, size, on_disk)
        if on_disk:
            self.spilled_bytes += size
        else:
            self.bytes += size

    def open(self, placed: Placed) -> pa.RecordBatch:
        """The batch, for the store itself. Raises `StoreError` if its rows have ended."""
        segment = self._segments.get(placed.segment)
        if segment is None or segment.placed != placed:
            raise StoreError(f"segment {placed.segment}: its rows have ended.")
        segment.uses[SELF] += 1
        return self._mappings.read(placed)

    def drop(self, name: str) -> None:
        """No row lies in it any more."""
        self._segments[name].is_over = True
        self._settle(name)
        self.unuse(SELF, self._mappings.over())

    def use(self, client: str, name: str) -> None:
        """The client is told of it, and will read it."""
        segment = self._segments[name]
        segment.uses[client] += 1
        segment.seen.add(client)

    def unuse(self, client: str, names: list[str]) -> None:
        """So many readings have ended."""
        for name in names:
            segment = self._segments.get(name)
            if segment is not None:
                segment.uses[client] -= 1
                if segment.uses[client] <= 0:
                    del segment.uses[client]
                self._settle(name)

    def notice(self, client: str) -> Notice | None:
        """What it has not heard yet."""
        notice = self._writers.get(client)
        if notice is None or not (notice.recycled or notice.gone):
            return None
        self._writers[client] = Notice()
        return notice

    def left(self, client: str) -> None:
        """A client's process has ended: it reads nothing, and what it wrote and never handed over goes."""
        self._writers.pop(client, None)
        for name, segment in list(self._segments.items()):
            segment.seen.discard(client)
            if segment.uses.pop(client, 0):
                self._settle(name)
        for place in (self.directory, self.spill):
            for file in place.glob(f"{client}-*"):
                if file.name not in self._segments:
                    self.pooled_bytes -= self._pooled.pop(file.name, 0)
                    with suppress(OSError):
                        file.unlink()

    def close(self) -> None:
        for place in (self.directory, self.spill):
            shutil.rmtree(place, ignore_errors=True)

    def _settle(self, name: str) -> None:
        """Back to its writer, or away, once nobody needs it."""
        segment = self._segments[name]
        if not segment.is_over or segment.uses:
            return
        del self._segments[name]
        if segment.on_disk:
            self.spilled_bytes -= segment.nbytes
        else:
            self.bytes -= segment.nbytes
        writer = name.rpartition("-")[0]
        pooled = self.pooled_bytes + segment.nbytes
        if writer in self._writers and not segment.on_disk and pooled <= self.max_bytes // POOLED_SHARE:
            self._pooled[name], self.pooled_bytes = segment.nbytes, pooled
            self._writers[writer].recycled.append(name)
            return
        self._tell_gone(name, {writer, *segment.seen})
        with suppress(OSError):
            ((self.spill if segment.on_disk else self.directory) / name).unlink()

    def _tell_gone(self, name: str, clients: set[str]) -> None:
        for client in clients & self._writers.keys():
            self._writers[client].gone.append(name)
        self._mappings.gone([name])
        self._arena.gone([name])

    def _move_to_disk(self, file: Path) -> None:
        """Its writer hears of it: its mapping would hold on to the pages."""
        try:
            self.spill.mkdir(parents=True, exist_ok=True)
            shutil.move(file, self.spill / file.name)
        except OSError as error:
            raise StoreError(
                f"segment {file.name} cannot be moved to {self.spill}: {error}. Set store.spill_dir to a larger "
                "disk, or lower store.max_bytes or raise store.shared_memory_mib, so that nothing needs to be moved."
            ) from None
        self._tell_gone(file.name, {file.name.rpartition("-")[0]})
