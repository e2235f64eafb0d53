"""The requests of one client, and their results: a request is on the disk before it is acknowledged, a result before it
is told. What was told once is told again, and a retry is recognised by its number and its content.

    accept ─▶ requests.journal ─▶ (carried out) ─▶ answer ─▶ results.journal ─▶ answer_of, for who asks

Bodies of requests are dropped when nothing needs them any more (`drop_bodies`), results when there are more than
`keep` newer ones. After a start on the same directory everything is as it was acknowledged: a request whose body is
there and whose result is not has none yet.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.orchestrator.serve.journal import Journal, JournalError, Place
from penstock.orchestrator.serve.wire.results import Answer

OLD_RESULTS = "results-old.journal"
LARGE_BYTES = 2**26
"""Size from which a journal of requests is made small again."""


class OtherContent(PenstockError):
    """A request that comes with the number of another one."""


class ResultGone(PenstockError):
    """A result that is kept no longer."""


@dataclass(frozen=True)
class Asked:
    """A request as it has come."""

    seq: int
    kind: str
    """What it asks for, as its endpoint is called."""
    body: bytes
    content_type: str = ""
    identity: bytes = b""
    """What is the same in each retry; empty: the body."""
    tokens: int = 1


@dataclass
class Entry:
    """A request by its number."""

    seq: int
    kind: str
    """What it asks for, as its endpoint is called."""
    digest: str
    content_type: str = ""
    tokens: int = 1
    """What it costs."""
    place: Place | None = None
    """Its body in the journal of requests, while it is needed."""
    answered: tuple[Journal, Place] | None = None
    answer_kind: str = ""
    is_failure: bool = False
    is_durable: asyncio.Event = field(default_factory=asyncio.Event)
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def header(self) -> dict[str, Any]:
        return {
            "seq": self.seq,
            "kind": self.kind,
            "digest": self.digest,
            "type": self.content_type,
            "tokens": self.tokens,
        }


class RequestLog:
    """Lifecycle: made for a directory, new or left by another process; `accept` and `answer` each request; `close`."""

    def __init__(self, directory: Path, keep: int, *, repeats: bool = False) -> None:
        """`repeats`: bodies of requests that have a result are needed, until `drop_bodies` is told otherwise."""
        self.directory, self._keep, self._repeats = directory, keep, repeats
        self.entries: dict[int, Entry] = {}
        self.highest_answered = -1
        """Number of the newest request that has a result."""
        self._ends: deque[tuple[int, bool]] = deque(maxlen=2 * keep)
        """Numbers of the newest requests that have a result, in the order of their ends, and whether each failed."""
        self.cursor = time.time_ns() // 1000
        """Cursor of who has heard of all ends. It starts at the time in microseconds and grows by one with each end,
        which takes longer. So it is larger than any from before a start: who has one of those hears of all again."""
        self._any_end = asyncio.Event()
        self._large_bytes = LARGE_BYTES
        self._requests = Journal(directory / "requests.journal")
        self._old = Journal(directory / OLD_RESULTS)
        self._results = Journal(directory / "results.journal")
        for record in self._requests.records:
            entry = self.entries[record.header["seq"]] = _entry(record.header)
            entry.place = record.place
        for journal in (self._old, self._results):
            for record in journal.records:
                self._note_answer(record.header, journal, record.place)
        self._num_taken = len(self._results.records)
        for entry in self.entries.values():
            entry.is_durable.set()

    def pending(self) -> list[Entry]:
        """Requests without a result, by their numbers."""
        return [entry for _, entry in sorted(self.entries.items()) if not entry.is_done.is_set()]

    async def accept(self, asked: Asked) -> Entry:
        """Take a request, or recognise one that was taken before. Returns once it is on the disk. Raises
        `OtherContent`, `JournalError`."""
        seq = asked.seq
        digest = hashlib.sha256(asked.kind.encode() + b"/" + (asked.identity or asked.body)).hexdigest()[:32]
        known = self.entries.get(seq)
        if known is not None:
            if known.digest != digest:
                raise OtherContent(
                    f"request {seq} was taken before with other content ({known.kind}): a number is for one request. "
                    "Two clients use one training client; make one for each."
                )
            await known.is_durable.wait()
            if self.entries.get(seq) is not known:
                raise JournalError(f"request {seq} could not be written. Send it again.")
            return known
        entry = self.entries[seq] = Entry(seq, asked.kind, digest, asked.content_type, asked.tokens)
        try:
            entry.place = await self._requests.append(entry.header, asked.body)
        except BaseException:
            del self.entries[seq]
            raise
        finally:
            entry.is_durable.set()
        return entry

    async def answer(self, entry: Entry, answer: Answer) -> None:
        """Keep a result; who waits for it is told once it is on the disk. Raises `JournalError`."""
        header = {**entry.header, "answer": answer.message, "failed": answer.is_failure}
        gone = await self._rolled() if self._num_taken >= self._keep else None
        self._num_taken += 1
        journal = self._results
        self._note_answer(header, journal, await journal.append(header, answer.body))
        if gone is not None:
            await gone.close()

    def ended_since(self, cursor: int) -> list[tuple[int, bool]]:
        """Numbers of the requests that have ended from this cursor on, and whether each failed. Those that ended long
        ago, whose results are gone, are left out."""
        unheard = self.cursor - cursor if cursor <= self.cursor else len(self._ends)
        return list(self._ends)[max(0, len(self._ends) - unheard) :]

    async def next_end(self, timeout_s: float) -> None:
        """Wait until some request ends, or so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._any_end.wait()

    def answer_of(self, entry: Entry) -> Answer | None:
        """The result of a request; None while there is none. From any thread. Raises `ResultGone`, `JournalError`."""
        if (answered := entry.answered) is not None:
            journal, place = answered
            try:
                return Answer(journal.read(place), entry.answer_kind, entry.is_failure)
            except JournalError:
                if entry.answered is not None:
                    raise
        if entry.is_done.is_set():
            raise ResultGone(f"the result of request {entry.seq} is kept no longer (serve.keep_results).")
        return None

    def body_of(self, entry: Entry) -> bytes:
        if entry.place is None:
            raise ResultGone(f"request {entry.seq} is kept no longer.")
        return self._requests.read(entry.place)

    async def drop_bodies(self, is_needed: Callable[[int], bool]) -> None:
        """Drop the bodies of requests that have their result and are not needed, by their numbers, and make the journal
        small again. Raises `JournalError`."""
        dropped = {seq for seq, entry in self.entries.items() if entry.is_done.is_set() and not is_needed(seq)}
        newest = {seq for seq, _ in list(self._ends)[-self._keep :]}
        for seq in dropped:
            self.entries[seq].place = None
            if seq not in newest:
                del self.entries[seq]
        await self._requests.rewrite(lambda header: header["seq"] not in dropped and header["seq"] in self.entries)
        self._large_bytes = max(LARGE_BYTES, 2 * self._requests.num_bytes)

    @property
    def is_large(self) -> bool:
        """Whether bodies should be dropped: the journal has doubled since."""
        return self._requests.num_bytes > self._large_bytes

    async def close(self) -> None:
        for journal in (self._requests, self._results, self._old):
            await journal.close()

    async def _rolled(self) -> Journal:
        """Begin a new file of results; the one before stays, the one before that goes, and is returned. Raises
        `JournalError`."""
        self._num_taken = 0  # this caller does it, whoever comes meanwhile
        if not self._repeats:
            await self.drop_bodies(lambda _: False)
        gone = self._old
        for entry in [entry for entry in self.entries.values() if entry.answered and entry.answered[0] is gone]:
            entry.answered = None
            if entry.place is None:
                del self.entries[entry.seq]
        path = self._results.path
        self._old = self._results
        self._old.path = path.replace(path.with_name(OLD_RESULTS))
        self._results = Journal(path)
        return gone

    def _note_answer(self, header: dict[str, Any], journal: Journal, place: Place) -> None:
        entry = self.entries.setdefault(header["seq"], _entry(header))
        entry.answered, entry.answer_kind, entry.is_failure = (journal, place), header["answer"], header["failed"]
        self.highest_answered = max(self.highest_answered, entry.seq)
        entry.is_done.set()
        self._ends.append((entry.seq, entry.is_failure))
        self.cursor += 1
        self._any_end.set()
        self._any_end = asyncio.Event()
        if len(self._ends) > self._keep:
            self._forget(self._ends[-self._keep - 1][0])

    def _forget(self, seq: int) -> None:
        """Forget a result that is too old, unless the request's body is needed."""
        entry = self.entries.get(seq)
        if entry is not None and entry.place is None:
            del self.entries[seq]


def _entry(header: dict[str, Any]) -> Entry:
    return Entry(header["seq"], header["kind"], header["digest"], header["type"], header["tokens"])
