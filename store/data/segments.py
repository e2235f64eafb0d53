"""The store's side of large batches: which files there are, who reads them, and when they may be written again.

    written ─ adopt ─▶ the store's ─ end, last use over ─▶ back to its writer, to be written again
                            └─ beyond the budget ─▶ moved to disk        └─ or removed

A producer writes the file (`arena.py`) and names it in its call; from then on the store decides when it goes, so a
producer that dies takes nothing along. What exceeds the budget of shared memory is moved to disk, where it is mapped
all the same: rows that came last are needed last. A client hears of what ended with its next answer, or soon if there
is none. What becomes of a file is decided in `segment_book.py`; here it is done. Used by `service/store.py` and
`service/server.py`.
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
from msgspec import Struct

from penstock.store.data.arena import Arena
from penstock.store.data.layout import Placed
from penstock.store.data.mappings import Mappings
from penstock.store.data.roots import claim_root, remove_root, sweep_stale
from penstock.store.data.segment_book import Instructions, SegmentBook, writer_of
from penstock.store.data.soon import Soon
from penstock.store.errors import StoreError

SELF = ""
"""Among the readers: the store itself."""
COPIED_AT_ONCE = 1 << 20
"""Bytes."""


class Notice(Struct, array_like=True):
    """What a client hears with the next answer: files that it may write again, and files to forget."""

    recycled: list[str] = []
    removed: list[str] = []


class Segments:
    """The files of one store. `directory`: in shared memory; `spill`: on disk. Neither may exist: they are made for
    this store, only its user may enter them, and they go with `close`, or are swept by the next store beside them.
    """

    def __init__(self, directory: str, spill: str, max_bytes: int) -> None:
        """Raises `StoreError`."""
        self.directory, self.spill = Path(directory), Path(spill)
        self._make_places()
        self.book = SegmentBook(max_bytes)
        self._notices: dict[str, Notice] = {}
        """Of clients that are connected."""
        self._tell: dict[str, Callable[[], None]] = {}
        places = (str(self.directory), str(self.spill))
        self._arena = Arena(places, f"store{os.getpid()}")
        self._mappings = Mappings(places, self._own_use_ended)
        self._unuse_soon: Soon | None = None

    def entered(self, client: str, tell: Callable[[], None]) -> None:
        """It may write and read from now on. `tell`: called when there is a notice for it."""
        self.book.entered(client)
        self._notices[client], self._tell[client] = Notice(), tell

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
        """A file that a producer has written is the store's from now on. Raises `StoreError` if it is none, or if it
        must be moved to disk and cannot be: then it goes back to its writer, or away."""
        name = placed.segment
        file = self.directory / name
        on_disk = not file.exists()
        try:
            size = (self.spill / name if on_disk else file).stat().st_size
        except OSError as error:
            raise StoreError(f"segment {name} of {self.directory} cannot be read: {error}.") from None
        if placed.nbytes > size or self.book.in_use(name):
            raise StoreError(f"segment {name} has {size} bytes, not the {placed.nbytes} of its batch, or is in use.")
        if self.book.adopt(name, placed, size, on_disk):
            try:
                self._move_to_disk(name)
            except StoreError:
                self.end(name)
                raise

    def open(self, placed: Placed) -> pa.RecordBatch:
        """The batch, for the store itself. Raises `StoreError` if its rows have ended."""
        name = placed.segment
        if not self.book.in_use(name) or self.book.segments[name].content != placed:
            raise StoreError(f"segment {placed.segment}: its rows have ended.")
        if self._unuse_soon is None:
            self._unuse_soon = Soon(asyncio.get_running_loop(), self._unuse_own)
        self.book.use(SELF, name)
        return self._mappings.read(placed)

    def end(self, name: str) -> None:
        """No row lies in it any more."""
        self._carry_out(self.book.end(name))

    def use(self, client: str, name: str) -> None:
        """The client is told of it, and will read it."""
        self.book.use(client, name)

    def unuse(self, client: str, names: list[str]) -> None:
        """So many readings have ended."""
        for name in names:
            self._carry_out(self.book.unuse(client, name))

    def notice(self, client: str) -> Notice | None:
        """What it has not heard yet."""
        notice = self._notices.get(client)
        if notice is None or not (notice.recycled or notice.removed):
            return None
        self._notices[client] = Notice()
        return notice

    def left(self, client: str) -> None:
        """A client's process has ended: it reads nothing, and what it wrote and never handed over goes."""
        self._notices.pop(client, None)
        self._tell.pop(client, None)
        self._carry_out(self.book.left(client))
        for place in (self.directory, self.spill):
            for file in place.glob(f"{client}-*"):
                if file.name not in self.book.segments:
                    with suppress(OSError):
                        file.unlink()

    def close(self) -> None:
        """Nobody reads or writes any more. A second time changes nothing."""
        self._mappings.close()
        for place in (self.directory, self.spill):
            remove_root(place)

    def _make_places(self) -> None:
        try:
            for place in (self.directory, self.spill):
                sweep_stale(place.parent)
                claim_root(place)
        except OSError as error:
            if place == self.spill:
                remove_root(self.directory)
            raise StoreError(
                f"the store cannot make {place}: {error}. It makes its directories anew, and what is there already is "
                "another's. Make room in shared memory, or set store.spill_dir to a disk that this user may write to."
            ) from None

    def _carry_out(self, instructions: Instructions) -> None:
        for name in instructions.recycled:
            writer = writer_of(name)
            self._notices[writer].recycled.append(name)
            self._tell[writer]()
        for name, clients in instructions.unmapped:
            for client in clients:
                self._notices[client].removed.append(name)
                self._tell[client]()
            self._mappings.forget([name])
            self._arena.forget([name])
        for name, on_disk in instructions.removed:
            with suppress(OSError):
                ((self.spill if on_disk else self.directory) / name).unlink()

    def _own_use_ended(self) -> None:
        if self._unuse_soon is not None:
            self._unuse_soon()

    def _unuse_own(self) -> None:
        self.unuse(SELF, self._mappings.ended())

    def _move_to_disk(self, name: str) -> None:
        """Who has it mapped hears of it: the mapping would hold on to the pages. Raises `StoreError`; then nothing has
        moved."""
        try:
            _move(self.directory / name, self.spill / name)
        except OSError as error:
            raise StoreError(
                f"segment {name} cannot be moved to {self.spill}: {error}. Set store.spill_dir to a larger disk, or "
                "lower store.max_bytes or raise store.shared_memory_mib, so that nothing needs to be moved."
            ) from None
        self._carry_out(self.book.spilled(name))


def _move(source: Path, target: Path) -> None:
    """To another file system. A target that exists is another's, and stays. Raises `OSError`; then the source is as
    before and there is nothing new."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as copy, source.open("rb") as original:
            shutil.copyfileobj(original, copy, COPIED_AT_ONCE)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    source.unlink()
