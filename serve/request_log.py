"""The requests of one client, and their results: a request is on the disk before it is acknowledged, a result before it
is told. What was told once is told again, and a retry is recognised by its number and its content.

    accept ─▶ requests.journal ─▶ (carried out) ─▶ answer ─▶ results.journal ─▶ answer_of, for who asks

Bodies of requests are dropped when nothing needs them any more (`drop_bodies`), results when there are more than
`keep` newer ones and the body is dropped: a request that is there without a result has none yet, and one that may be
repeated is known to have failed. So after a start on the same directory everything is as it was acknowledged.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.serve.backend import BackendFailed
from penstock.serve.journal import Journal, JournalDamaged, JournalError, Record, RecordDropped, refusals
from penstock.serve.sdk_messages import Answer, failure
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.runtime.local_files import replacing

_LOG = logging.getLogger("penstock")
CHANGING = ("create_model", "load_model", "forward_backward", "optim_step", "load_weights")
"""Kinds of requests after which an adapter is another one."""


class WrongNumber(PenstockError):
    """A request with the number of another one, or of one whose turn is over."""


class Gone(PenstockError):
    """A result or a session that is kept no longer."""


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
        _join_older(directory)
        self._requests, self._results = (Journal(directory / f"{name}.journal") for name in ("requests", "results"))
        for record in self._requests.records:
            entry = self.entries[record.header["seq"]] = _entry(record.header)
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

    async def answer(self, entry: Entry, answer: Answer) -> None:
        """Keep a result; who waits for it is told once it is on the disk. Raises `JournalError`."""
        if self._num_new >= self._keep or self._requests.is_large:
            await self._make_small()
        self._num_new += 1
        header = {**entry.header, "answer": answer.message, "failed": answer.is_failure}
        self._note_answer(await self._results.append(header, answer.body))

    def answer_of(self, entry: Entry) -> Answer | None:
        """The result of a request; None while there is none. From any thread. Raises `Gone`, `JournalError`."""
        if entry.answered is not None:
            with contextlib.suppress(RecordDropped):
                return Answer(self._results.read(entry.answered), entry.answer_kind, entry.is_failure)
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
        self._num_new %= self._keep  # this caller does it, whoever comes meanwhile
        try:
            await self.drop_bodies()
            if is_full:
                await self._results.rewrite(lambda header: header["seq"] in self.entries)
        except JournalError as error:
            _LOG.warning("%s", error)

    def _note_answer(self, record: Record) -> None:
        header = record.header
        entry = self.entries.setdefault(header["seq"], _entry(header))
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


def failure_of(error: Exception, what: str) -> Answer:
    """The answer to a request that has failed. Raises the error of one that is carried out again, once the disk takes
    it (`JournalError`) or by the next server (`BackendFailed`)."""
    if isinstance(error, OSError):
        raise JournalError(f"{what}: {error}. It is tried again.") from error
    if isinstance(error, BackendFailed) or (isinstance(error, JournalError) and not isinstance(error, JournalDamaged)):
        raise error
    if isinstance(error, PenstockError):
        return failure(str(error), is_users=isinstance(error, BadRequest | DataError | ConfigError))
    _LOG.error("%s has failed", what, exc_info=error)
    return failure(f"{type(error).__name__}: {error}", is_users=False)


def _join_older(directory: Path) -> None:
    """Bring the results that the version before kept in two files into one."""
    older, newer = directory / "results-old.journal", directory / "results.journal"
    if older.exists():
        with refusals(older), replacing(newer, synced=True) as part:
            part.write_bytes(older.read_bytes() + (newer.read_bytes() if newer.exists() else b""))
        older.unlink()


def _entry(header: dict[str, Any]) -> Entry:
    return Entry(header["seq"], header["kind"], header["type"], header["tokens"], header["digest"])
