"""A file to which records are added, each of which is on the disk before its caller goes on.

    [length 4][crc32 4][header length 4][header, JSON][body] … [end: a record whose header is empty]

Records that are added at the same time are written and synced together (group commit), in a thread; all but the first
of such a batch are marked, in the header length. A batch is written once the one before is on the disk, in the place of
the end, and gets an end of its own. So only a batch without an end can be torn, by a kill or a power cut, and that is
dropped when the file is read. A damaged record with a whole batch or the end behind it was acknowledged: the file is
refused, and stays as it is.
"""

import asyncio
import contextlib
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.store.data import durable
from penstock.workers.runtime.local_files import replacing

_LOG = logging.getLogger("penstock")
_FRAME = struct.Struct("<III")
_JOINED = 2**31
"""Mark of a record that was written together with the one before it."""
Header = dict[str, Any]


class JournalError(PenstockError):
    """A file that cannot be written or read now: nothing is acknowledged that is not on the disk."""


class JournalDamaged(JournalError):
    """A journal with a record that is not what was written."""


class RecordDropped(PenstockError):
    """A record that a rewrite has dropped."""


@dataclass(eq=False)
class Record:
    """A record of a journal, which moves it when it is rewritten."""

    header: Header
    num_bytes: int
    checksum: int
    offset: int = -1
    """Offset of its body in the file; negative before it is on the disk, and once it is dropped."""


class Journal:
    """Lifecycle: made for a file, new or left by another process; `append` any number of times; `rewrite` for fewer
    records; `close`. The file is opened when it is first needed.

    journal = Journal(path)
    record = await journal.append({"seq": 7}, body)
    assert journal.read(record) == body
    """

    def __init__(self, path: Path, large_bytes: int = 2**26) -> None:
        """`large_bytes`: size from which it is large. Raises `JournalError`, `JournalDamaged`."""
        self.path, self._least_bytes, self._large_bytes = path, large_bytes, large_bytes
        with refusals(path):
            self.records, self._num_bytes = _scanned(path)
        """Records in the order of the file."""
        self._file, self.is_closed = -1, False
        self._waiting: list[tuple[Record, bytes]] = []
        self._refusal = ""
        """Why the last write has failed."""
        self._turn = asyncio.Lock()
        self._reading = threading.Lock()
        """Held while a record is read, and while records move with their file."""

    async def append(self, header: Mapping[str, Any], body: bytes = b"") -> Record:
        """Add a record; returns when it is on the disk. Raises `JournalError`."""
        if self.is_closed:
            raise JournalError(f"{self.path}: the server is ending. The request is not taken; send it again.")
        record = Record(dict(header), len(body), zlib.crc32(body))
        self._waiting.append((record, body))
        await self._in_turn(self._flush)
        if record.offset < 0:
            raise JournalError(self._refusal)
        return record

    async def rewrite(self, is_kept: Callable[[Header], bool]) -> None:
        """Drop the records that are not kept, in one step. Raises `JournalError`; then all are there."""
        await self._in_turn(lambda: self._rewrite(is_kept))

    def read(self, record: Record) -> bytes:
        """The body of a record, from any thread. Raises `JournalError`, as it does once the journal is closed,
        `RecordDropped` and `JournalDamaged`."""
        with self._reading, refusals(self.path):
            if self.is_closed:
                raise JournalError(f"{self.path}: is closed.")
            if record.offset < 0:
                raise RecordDropped(f"{self.path}: the record is kept no longer.")
            body = os.pread(self._opened(), record.num_bytes, record.offset)
        if zlib.crc32(body) != record.checksum:
            raise JournalDamaged(f"{self.path}: the record at byte {record.offset:,} is not what was written.")
        return body

    @property
    def is_large(self) -> bool:
        """Whether it has doubled since it was rewritten."""
        return self._num_bytes > self._large_bytes

    async def close(self) -> None:
        """Close the file, once what was appended is written."""
        self.is_closed = True
        await self._in_turn(self._close)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do what changes the file, one after the other. A cancelled caller does not stop it."""

        async def turn() -> None:
            async with self._turn:
                await work()

        task = asyncio.create_task(turn())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # where nobody waits any more
        await asyncio.shield(task)

    async def _flush(self) -> None:
        """Write all that waits, unless another caller has."""
        batch, self._waiting = self._waiting, []
        try:
            framed = await asyncio.to_thread(self._put, batch) if batch else []
        except Exception as error:  # noqa: BLE001 - each of the batch hears of it
            self._refusal = f"{self.path}: {getattr(error, 'strerror', None) or repr(error)}. Make room and try again."
            return
        self.records += [record for record, _ in batch]
        self._settle([record for record, _ in batch], framed)

    async def _close(self) -> None:
        with self._reading:
            self._shut()

    def _shut(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    async def _rewrite(self, is_kept: Callable[[Header], bool]) -> None:
        kept = [record for record in self.records if is_kept(record.header)]
        self._large_bytes = 2 * self._num_bytes  # if it fails
        with refusals(self.path):
            framed = await asyncio.to_thread(self._rewritten, kept)
        with self._reading:
            self._shut()
            for record in self.records:
                record.offset = -1
            self.records, self._num_bytes = kept, 0
            self._settle(kept, framed)
        self._large_bytes = max(self._least_bytes, 2 * self._num_bytes)

    def _opened(self) -> int:
        """The open file, without a torn end, and with its name on the disk."""
        if self._file < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _end(self._file, self._num_bytes)
                durable.sync_name(self.path)
            except OSError:
                self._shut()
                raise
        return self._file

    def _settle(self, records: Sequence[Record], framed: Sequence[bytes]) -> None:
        """Note where records lie that were written behind the others."""
        for record, data in zip(records, framed, strict=True):
            self._num_bytes += len(data)
            record.offset = self._num_bytes - record.num_bytes

    def _put(self, batch: Sequence[tuple[Record, bytes]]) -> list[bytes]:
        """Write behind the last whole record: what a failed write has left there is overwritten, or cut off. Returns
        each record as it was written."""
        framed = [_framed(record, body, is_joined=index > 0) for index, (record, body) in enumerate(batch)]
        with self._reading:
            file = self._opened()
        try:
            view, offset = memoryview(b"".join(framed)), self._num_bytes
            while view:
                written = os.pwrite(file, view, offset)
                view, offset = view[written:], offset + written
            durable.sync_opened(file)
        except OSError:
            _end(file, self._num_bytes)
            raise
        _end(file, offset)
        return framed

    def _rewritten(self, kept: Sequence[Record]) -> list[bytes]:
        """Put a file with these records in the place of the present one. Returns each record as it is in it."""
        framed = [_framed(record, self.read(record)) for record in kept]
        with self._reading:
            before = self._opened()
        try:
            with replacing(self.path, synced=True) as part:
                part.touch(0o600)
                part.write_bytes(b"".join([*framed, _END]))
        except OSError:
            if os.path.samestat(os.fstat(before), self.path.stat()):
                raise  # else the new one has the name, which is synced when it is opened
        return framed


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Raise `JournalError` for what the disk or its limits refuse now."""
    try:
        yield
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}. Make room; it is tried again.") from error


def _framed(record: Record, body: bytes, *, is_joined: bool = False) -> bytes:
    head = json.dumps(record.header).encode()
    rest = struct.pack("<I", len(head) + _JOINED * is_joined) + head + body
    return struct.pack("<II", len(rest), zlib.crc32(rest)) + rest


_END = _framed(Record({}, 0, 0), b"")


def _end(file: int, num_bytes: int) -> None:
    """End a file behind its last record. Not synced: a power cut may take the end, and then damage of the last batch
    looks like a torn one."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, num_bytes)
        os.pwrite(file, _END, num_bytes)


def _scanned(path: Path) -> tuple[list[Record], int]:
    """All whole records, and the bytes that they take. Raises `JournalDamaged`, `OSError`."""
    records: list[Record] = []
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return records, 0
    start = 0
    while (found := _record_at(data, start)) is not None and found[0].header:
        record, _, start = found
        records.append(record)
    if data[start:] not in (b"", _END):
        if (later := _batch_after(data, start)) is not None:
            raise JournalDamaged(
                f"{path}: the record at byte {start:,} is damaged, and whole ones follow at byte {later:,}. The file "
                "is kept as it is: bring it back from a copy, or move it away to go on without it."
            )
        _LOG.warning("%s: the last %d bytes are torn, and dropped.", path, len(data) - start)
    return records, start


def _record_at(data: bytes, start: int) -> tuple[Record, bool, int] | None:
    """The record at an offset, whether it was written together with the one before, and its end; None: none is whole
    there."""
    if start + _FRAME.size > len(data):
        return None
    num_rest, checksum, num_head = _FRAME.unpack_from(data, start)
    is_joined, num_head, end = num_head >= _JOINED, num_head % _JOINED, start + 8 + num_rest
    if end > len(data) or num_head + 4 > num_rest or zlib.crc32(memoryview(data)[start + 8 : end]) != checksum:
        return None
    at = start + _FRAME.size + num_head
    header = json.loads(data[start + _FRAME.size : at])
    return Record(header, end - at, zlib.crc32(memoryview(data)[at:end]), at), is_joined, end


def _batch_after(data: bytes, start: int) -> int | None:
    """Offset of the first whole record behind one that is not, unless it was written together with it."""
    header = data.find(b"{", start + _FRAME.size + 1)
    while header >= 0:
        found = _record_at(data, header - _FRAME.size)
        if found is not None and not found[1]:
            return header - _FRAME.size
        header = data.find(b"{", header + 1)
    return None
