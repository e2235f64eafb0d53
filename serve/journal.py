"""Journals, whose records are on the disk before they are acknowledged, and the requests of one client on two of them.

    [length 4][crc32 4][header length 4][header, JSON][body] … [end: a record whose header is empty]

Records that are added at the same time are written and synced together (group commit), in a thread; all but the first
of such a batch are marked, in the header length. A batch is written once the one before is on the disk, in the place of
the end, and gets an end of its own. So only a batch without an end can be torn, by a kill or a power cut, and that is
dropped when the file is read. A damaged record with a whole batch or the end behind it was acknowledged: the file is
refused, and stays as it is.

    accept ─▶ requests.journal ─▶ (carried out) ─▶ answer ─▶ results.journal ─▶ answer_of

A result that was sent once is sent again, and a retry is recognised by its number and its content. Bodies of requests
are dropped when nothing needs them any more (`drop_bodies`), results when there are more than `keep` newer ones and the
body is dropped: a request in the journal without a result has none yet, and one that may be repeated is known to have
failed. So after a start on the same directory everything is as it was acknowledged.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.serve.sdk_messages import RequestResult
from penstock.store.data import durable
from penstock.workers.runtime.local_files import replacing

_LOG = logging.getLogger("penstock")
_FRAME = struct.Struct("<III")
_JOINED = 2**31
"""Mark of a record that was written together with the one before it."""
Header = dict[str, Any]
CHANGING = ("create_model", "load_model", "forward_backward", "optim_step", "load_weights")
"""Kinds of requests after which an adapter is another one."""


class JournalError(PenstockError):
    """A file that cannot be written or read now. Nothing is acknowledged before it is on the disk."""


class Gone(PenstockError):
    """A record, a result or a session that is kept no longer."""


class JournalDamaged(JournalError):
    """A journal with a record that is not what was written."""


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
        with disk_errors(path):
            self.records, self._num_bytes = _read_records(path)
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
        await self._run_alone(self._flush)
        if record.offset < 0:
            raise JournalError(self._refusal)
        return record

    async def rewrite(self, is_kept: Callable[[Header], bool]) -> None:
        """Drop the records that are not kept, in one step. Raises `JournalError`; then all are there."""
        await self._run_alone(lambda: self._rewrite(is_kept))

    def read(self, record: Record) -> bytes:
        """The body of a record, from any thread. Raises `JournalError`, as it does once the journal is closed,
        `Gone` and `JournalDamaged`."""
        with self._reading, disk_errors(self.path):
            if self.is_closed:
                raise JournalError(f"{self.path}: is closed.")
            if record.offset < 0:
                raise Gone(f"{self.path}: the record is kept no longer.")
            body = os.pread(self._open_file(), record.num_bytes, record.offset)
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
        await self._run_alone(self._close)

    async def _run_alone(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run changes of the file one after the other. A cancelled caller does not stop its change."""

        async def turn() -> None:
            async with self._turn:
                await work()

        task = asyncio.create_task(turn())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # of a cancelled caller
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
        self._set_offsets([record for record, _ in batch], framed)

    async def _close(self) -> None:
        with self._reading:
            self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    async def _rewrite(self, is_kept: Callable[[Header], bool]) -> None:
        kept = [record for record in self.records if is_kept(record.header)]
        self._large_bytes = 2 * self._num_bytes  # if it fails
        with disk_errors(self.path):
            framed = await asyncio.to_thread(self._write_replacement, kept)
        with self._reading:
            self._close_file()
            for record in self.records:
                record.offset = -1
            self.records, self._num_bytes = kept, 0
            self._set_offsets(kept, framed)
        self._large_bytes = max(self._least_bytes, 2 * self._num_bytes)

    def _open_file(self) -> int:
        """The open file, without a torn end, and with its name on the disk."""
        if self._file < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _mark_end(self._file, self._num_bytes)
                durable.sync_name(self.path)
            except OSError:
                self._close_file()
                raise
        return self._file

    def _set_offsets(self, records: Sequence[Record], framed: Sequence[bytes]) -> None:
        """Note where records lie that were written behind the others."""
        for record, data in zip(records, framed, strict=True):
            self._num_bytes += len(data)
            record.offset = self._num_bytes - record.num_bytes

    def _put(self, batch: Sequence[tuple[Record, bytes]]) -> list[bytes]:
        """Write behind the last whole record: what a failed write has left there is overwritten, or cut off. Returns
        each record as it was written."""
        framed = [_encode_record(record, body, is_joined=index > 0) for index, (record, body) in enumerate(batch)]
        with self._reading:
            file = self._open_file()
        try:
            view, offset = memoryview(b"".join(framed)), self._num_bytes
            while view:
                written = os.pwrite(file, view, offset)
                view, offset = view[written:], offset + written
            durable.sync_opened(file)
        except OSError:
            _mark_end(file, self._num_bytes)
            raise
        _mark_end(file, offset)
        return framed

    def _write_replacement(self, kept: Sequence[Record]) -> list[bytes]:
        """Put a file with these records in the place of the present one. Returns each record as it is in it."""
        framed = [_encode_record(record, self.read(record)) for record in kept]
        with self._reading:
            before = self._open_file()
        try:
            with replacing(self.path, synced=True) as part:
                part.touch(0o600)
                part.write_bytes(b"".join([*framed, _END]))
        except OSError:
            if os.path.samestat(os.fstat(before), self.path.stat()):
                raise  # else the new one has the name, which is synced when it is opened
        return framed


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `JournalError` for an operation that the disk or a limit on files refuses."""
    try:
        yield
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}. Make room; it is tried again.") from error


def _encode_record(record: Record, body: bytes, *, is_joined: bool = False) -> bytes:
    head = json.dumps(record.header).encode()
    rest = struct.pack("<I", len(head) + _JOINED * is_joined) + head + body
    return struct.pack("<II", len(rest), zlib.crc32(rest)) + rest


_END = _encode_record(Record({}, 0, 0), b"")


def _mark_end(file: int, num_bytes: int) -> None:
    """End a file behind its last record. Not synced: a power cut may take the end, and then damage of the last batch
    looks like a torn one."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, num_bytes)
        os.pwrite(file, _END, num_bytes)


def _read_records(path: Path) -> tuple[list[Record], int]:
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


class WrongNumber(PenstockError):
    """A request with the number of another one, or of one whose turn is over."""


@dataclass
class Entry:
    """A request by its number."""

    seq: int
    kind: str
    """What it asks for, as its endpoint is called."""
    content_type: str = ""
    tokens: int = 1
    """What it costs."""
    digest: str = ""
    body: Record | None = None
    """Its body in the journal of requests, while it is needed."""
    answered: Record | None = None
    """Its result in the journal of results, while it is kept."""
    answer_kind: str = ""
    is_failure: bool = False
    came: float = field(default_factory=time.monotonic)
    """When it was accepted, or read after a start."""
    is_durable: asyncio.Event = field(default_factory=asyncio.Event)
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def changes(self) -> bool:
        """Whether an adapter is another one after it."""
        return self.kind in CHANGING and not self.is_failure

    @property
    def header(self) -> dict[str, Any]:
        return {"seq": self.seq, "kind": self.kind, "digest": self.digest, "type": self.content_type,
                "tokens": self.tokens}  # fmt: skip


class RequestLog:
    """Lifecycle: made for a directory, new or left by another process; `accept` and `answer` each request; `close`."""

    def __init__(self, directory: Path, keep: int, is_needed: Callable[[Entry], bool] = lambda entry: False) -> None:
        """`is_needed`: whether the body of a request that has its result is. Raises `JournalError`."""
        self.directory, self._keep, self._is_needed = directory, keep, is_needed
        self.entries: dict[int, Entry] = {}
        self.waiting: dict[int, int] = {}
        """Sizes of the bodies of requests without a result, by number."""
        self.highest_answered = -1
        """Number of the newest request that has a result."""
        self.highest_taken = -1
        self._ends: deque[int] = deque()
        """Numbers of the newest requests that have a result, in the order of their ends."""
        _merge_old_results(directory)
        self._requests, self._results = (Journal(directory / f"{name}.journal") for name in ("requests", "results"))
        for record in self._requests.records:
            entry = self.entries[record.header["seq"]] = _entry_of(record.header)
            entry.body, self.waiting[entry.seq] = record, record.num_bytes
        for record in self._results.records:
            self._note_answer(record)
        for entry in self.entries.values():
            entry.is_durable.set()
            self.highest_taken = max(self.highest_taken, entry.seq)
        self._num_new = len(self._results.records)

    def pending(self) -> list[Entry]:
        """Requests without a result, by their numbers."""
        return [self.entries[seq] for seq in sorted(self.waiting)]

    async def accept(self, entry: Entry, body: bytes, identity: bytes = b"") -> Entry:
        """Take a request, or recognise one that was taken before. Returns once it is on the disk. `identity`: what is
        the same in each retry; empty: the body. Raises `WrongNumber`, `JournalError`."""
        seq, known = entry.seq, self.entries.get(entry.seq)
        entry.digest = hashlib.sha256(entry.kind.encode() + b"/" + (identity or body)).hexdigest()[:32]
        if known is not None:
            if known.digest != entry.digest:
                raise WrongNumber(
                    f"request {seq} was taken before with other content ({known.kind}): a number is for one request. "
                    "Two clients use one training client; make one for each."
                )
            await known.is_durable.wait()
            if self.entries.get(seq) is not known:
                raise JournalError(f"request {seq} could not be written. Send it again.")
            return known
        self.entries[seq], self.waiting[seq] = entry, len(body)
        try:
            entry.body = await self._requests.append(entry.header, body)
            self.highest_taken = max(self.highest_taken, seq)
        except BaseException:
            del self.entries[seq], self.waiting[seq]
            raise
        finally:
            entry.is_durable.set()
        return entry

    async def answer(self, entry: Entry, answer: RequestResult) -> None:
        """Write a result; requests that wait for it get it once it is on the disk. Raises `JournalError`."""
        if self._num_new >= self._keep or self._requests.is_large:
            await self._make_small()
        self._num_new += 1
        header = {**entry.header, "answer": answer.message, "failed": answer.is_failure}
        self._note_answer(await self._results.append(header, answer.body))

    def answer_of(self, entry: Entry) -> RequestResult | None:
        """The result of a request; None while there is none. From any thread. Raises `Gone`, `JournalError`."""
        if entry.answered is not None:
            with contextlib.suppress(Gone):
                return RequestResult(self._results.read(entry.answered), entry.answer_kind, entry.is_failure)
        if entry.is_done.is_set():
            raise Gone(f"the result of request {entry.seq} is kept no longer (serve.keep_results).")
        return None

    def body_of(self, entry: Entry) -> bytes:
        if entry.body is None:
            raise Gone(f"request {entry.seq} is kept no longer.")
        return self._requests.read(entry.body)

    async def drop_bodies(self) -> None:
        """Drop the bodies of requests that have their result and are not needed. Raises `JournalError`; then all are
        there."""
        found = [one for one in self.entries.values() if one.is_done.is_set() and not self._is_needed(one)]
        dropped = {entry.seq for entry in found}
        await self._requests.rewrite(lambda header: header["seq"] not in dropped and header["seq"] in self.entries)
        newest = set(self._ends)
        for entry in found:
            entry.body = None
            if entry.seq not in newest and self.entries.get(entry.seq) is entry:
                del self.entries[entry.seq]

    @property
    def is_closed(self) -> bool:
        return self._results.is_closed

    async def close(self) -> None:
        for journal in (self._requests, self._results):
            await journal.close()

    async def _make_small(self) -> None:
        """Drop bodies that are not needed, and results if there are many. If that fails the files only stay larger."""
        is_full = self._num_new >= self._keep
        self._num_new %= self._keep  # this caller does it, not those that come meanwhile
        try:
            await self.drop_bodies()
            if is_full:
                await self._results.rewrite(lambda header: header["seq"] in self.entries)
        except JournalError as error:
            _LOG.warning("%s", error)

    def _note_answer(self, record: Record) -> None:
        header = record.header
        entry = self.entries.setdefault(header["seq"], _entry_of(header))
        entry.answered, entry.answer_kind, entry.is_failure = record, header["answer"], header["failed"]
        if entry.is_done.is_set():  # the result of one that was cancelled as it came
            return
        self.highest_answered = max(self.highest_answered, entry.seq)
        self.waiting.pop(entry.seq, None)
        entry.is_done.set()
        self._ends.append(entry.seq)
        if len(self._ends) > self._keep:
            oldest = self._ends.popleft()
            if oldest in self.entries and self.entries[oldest].body is None:
                del self.entries[oldest]


def _merge_old_results(directory: Path) -> None:
    """Bring the results that the version before kept in two files into one."""
    older, newer = directory / "results-old.journal", directory / "results.journal"
    if older.exists():
        with disk_errors(older), replacing(newer, synced=True) as part:
            part.write_bytes(older.read_bytes() + (newer.read_bytes() if newer.exists() else b""))
        older.unlink()


def _entry_of(header: dict[str, Any]) -> Entry:
    return Entry(header["seq"], header["kind"], header["type"], header["tokens"], header["digest"])
