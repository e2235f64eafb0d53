"""A file to which records are added, each of which is on the disk before its caller goes on.

    [length 4][crc32 4][header length 4][header, JSON][body] …

Records that are added at the same time are written and synced together (group commit), in a thread. A record that is
cut off or damaged at the end of the file, as a write that was killed leaves it, is dropped when the file is opened,
and what would follow it is never read as a record.
"""

import asyncio
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.workers.local_files import replacing

_FRAME = struct.Struct("<III")
Header = dict[str, Any]


class JournalError(PenstockError):
    """A journal that cannot be written: nothing is acknowledged that is not in it."""


@dataclass(eq=False)
class Place:
    """The place of a record's body in a journal, which moves it when it is rewritten."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Record:
    header: Header
    place: Place


class Journal:
    """Lifecycle: `open` reads what is there; `append` any number of times; `rewrite` for fewer records; `close`.

    journal = Journal(path)
    place = await journal.append({"seq": 7}, body)
    assert journal.read(place) == body
    """

    def __init__(self, path: Path) -> None:
        """Open a journal, new or left by another process, and cut off what is torn at its end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records, self._num_bytes = _scanned(path)
        """Records in the order of the file."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._num_bytes)
        self._waiting: list[tuple[Record, bytes, asyncio.Future[Place]]] = []
        self._lock = asyncio.Lock()
        self._reading = threading.Lock()
        """Held while a place is read, and while places change with their file: one holds in its own file alone."""
        self._flushing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def append(self, header: Mapping[str, Any], body: bytes = b"") -> Place:
        """Add a record; returns when it is on the disk. Raises `JournalError`."""
        if self._is_closed:
            raise JournalError(f"{self.path}: the server is ending. The request is not taken; send it again.")
        done: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        record = Record(dict(header), Place(0, len(body)))
        self._waiting.append((record, _framed(header, body), done))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        return await done

    async def rewrite(self, is_kept: Callable[[Header], bool]) -> None:
        """Drop the records that are not kept, in one step. Raises `JournalError`; then all are there."""
        async with self._lock:
            kept = [record for record in self.records if is_kept(record.header)]
            try:
                file, framed = await asyncio.to_thread(self._rewritten, kept)
            except OSError as error:
                raise self._failed(error) from error
            with self._reading:
                os.close(self._file)
                self._file, self.records, self._num_bytes = file, kept, 0
                for record, data in zip(kept, framed, strict=True):
                    self._settle(record, data)

    def read(self, place: Place) -> bytes:
        """The body of a record, from any thread. Raises `JournalError` once the journal is closed."""
        with self._reading:
            if self._file < 0:
                raise JournalError(f"{self.path}: is closed.")
            return os.pread(self._file, place.num_bytes, place.offset)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    async def close(self) -> None:
        """Close the file, once what was appended is written."""
        self._is_closed = True
        while self._flushing is not None:
            await asyncio.wait([self._flushing])
        async with self._lock:
            with self._reading:
                os.close(self._file)
                self._file = -1

    async def _flush(self) -> None:
        try:
            while self._waiting:
                async with self._lock:
                    batch, self._waiting = self._waiting, []
                    await self._write(batch)
        finally:
            self._flushing = None

    async def _write(self, batch: list[tuple[Record, bytes, "asyncio.Future[Place]"]]) -> None:
        try:
            await asyncio.to_thread(self._put, b"".join(data for _, data, _ in batch), self._num_bytes)
        except OSError as error:
            for _, _, done in batch:
                if not done.done():
                    done.set_exception(self._failed(error))
            return
        for record, data, done in batch:
            self._settle(record, data)
            self.records.append(record)
            if not done.done():
                done.set_result(record.place)

    def _settle(self, record: Record, data: bytes) -> None:
        """Note where a record lies that was written behind the others."""
        self._num_bytes += len(data)
        record.place.offset = self._num_bytes - record.place.num_bytes

    def _put(self, data: bytes, offset: int) -> None:
        """Write behind the last whole record: what a failed write has left there is overwritten, or cut off."""
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._num_bytes)
            raise

    def _rewritten(self, kept: list[Record]) -> tuple[int, list[bytes]]:
        """Put a file with these records in the place of the present one. Returns it, open, and each record in it."""
        framed = [_framed(record.header, self.read(record.place)) for record in kept]
        with replacing(self.path, synced=True) as part:
            part.write_bytes(b"".join(framed))
            part.chmod(0o600)
            file = os.open(part, os.O_RDWR)  # what cannot be opened takes no place
        sync_directory(self.path.parent)
        return file, framed

    def _failed(self, error: OSError) -> JournalError:
        return JournalError(f"{self.path}: {error.strerror}. Make room; until then requests are not taken.")


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _framed(header: Mapping[str, Any], body: bytes) -> bytes:
    head = json.dumps(header).encode()
    rest = struct.pack("<I", len(head)) + head + body
    return struct.pack("<II", len(rest), zlib.crc32(rest)) + rest


def _scanned(path: Path) -> tuple[list[Record], int]:
    """All whole records, and the bytes that they take."""
    records: list[Record] = []
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return records, 0
    start = 0
    while start + _FRAME.size <= len(data):
        num_rest, checksum, num_head = _FRAME.unpack_from(data, start)
        rest = memoryview(data)[start + 8 : start + 8 + num_rest]
        if len(rest) < num_rest or num_head + 4 > num_rest or zlib.crc32(rest) != checksum:
            break
        header = json.loads(bytes(rest[4 : 4 + num_head]))
        records.append(Record(header, Place(start + _FRAME.size + num_head, num_rest - 4 - num_head)))
        start += 8 + num_rest
    return records, start
