"""Failed writes of a run: a full or unreachable disk does not end training. They are counted and reported, and records
wait until they can be written.

    with failed_writes.tolerating("samples"):      # an OSError in here costs these samples
        parquet.write_table(…)

    file = AppendedFile(path, "metrics", failed_writes, open_for_lines)
    file.append(record)                            # whole, in order and once, now or later
"""

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.conf.secret import hide_in

TRIED_AGAIN = "It is lost, and the next is tried."
MAX_WAITING = 10_000
"""Most records of one file that are kept in memory, tens of MiB; beyond that the oldest is lost."""
KEPT = f"Up to {MAX_WAITING:,} of its records wait in memory until it can."


class FailedWrites:
    """Writes that failed, by kind. Kinds are `metrics`, `events`, `samples`, `timeline`, `tensorboard`, …, the names of
    trackers, and the class of a user's own sink.

    A kind fails from its first error until it can be written again. Both are reported once, and the error becomes an
    event; those in between are only counted.
    """

    def __init__(self, note: Callable[[str, Exception], None]) -> None:
        """`note`: called with the first error of a kind, for events.jsonl."""
        self.lost: Counter[str] = Counter()
        """Number of things that will never be written, by kind."""
        self.waiting: Counter[str] = Counter()
        """Number of records that are kept in memory until they can be written, by kind."""
        self._note = note
        self._failing: set[str] = set()
        self._lock = threading.Lock()
        """Lock for uploads, which fail in a thread of their own. Nothing is printed while it is held."""
        self._tell: Callable[[str], None] | None = None
        self._untold: list[str] = []

    def set_printer(self, tell: Callable[[str], None]) -> None:
        """Set the function that prints messages for the user; earlier messages are printed now."""
        self._tell = tell
        untold, self._untold = self._untold, []
        for text in untold:
            self.tell(text)

    @contextlib.contextmanager
    def tolerating(self, kind: str, advice: str = TRIED_AGAIN, *, is_cumulative: bool = False) -> Iterator[None]:
        """Tolerate an `OSError` in the block, which writes one thing of this kind. `advice`: what is printed if it
        cannot be written. `is_cumulative`: the next one has all that it would have had, so that nothing is lost with
        it."""
        try:
            yield
        except OSError as error:
            if not is_cumulative:
                self.count_lost(kind)
            self.record_failure(kind, error, advice)
        else:
            self.record_success(kind)

    def count_lost(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self.lost[kind] += count

    def set_waiting(self, kind: str, count: int) -> None:
        with self._lock:
            self.waiting[kind] = count

    def record_failure(self, kind: str, error: Exception, advice: str) -> None:
        with self._lock:
            is_first = kind not in self._failing
            self._failing.add(kind)
        if is_first:
            self.tell(hide_in(f"{kind}: cannot be written: {error}. {advice}"))
            self._note(kind, error)

    def record_success(self, kind: str) -> None:
        with self._lock:
            has_failed = kind in self._failing
            self._failing.discard(kind)
        if has_failed:
            self.tell(f"{kind}: can be written again")

    def tell(self, text: str) -> None:
        if self._tell is None:
            self._untold.append(text)
            return
        with contextlib.suppress(OSError):  # a screen that is a file on the same disk
            self._tell(text)

    def metrics(self) -> dict[str, float]:
        with self._lock:
            lost, waiting = self.lost.total(), self.waiting.total()
        return {"recording/lost": float(lost), "recording/waiting": float(waiting)}


class AppendedFile:
    """A file to which records are appended: whole, in order, each once, even if its disk is full or away for a while.

    Lifecycle: `append` at any time, `close` at the end; the file is opened when it is first needed.

    After an error it is opened again: a file system that was away comes back under the same path, and the part of a
    record that was written before the error is cut away. `waiting` is what the file does not have yet.
    """

    def __init__(self, path: Path, kind: str, failed_writes: FailedWrites, open_file: Callable[[Path], int]) -> None:
        """`open_file`: returns a descriptor for appending, after the last whole record of an earlier process. It may
        raise `OSError`, and what else it raises `append` raises."""
        self.waiting: deque[bytes] = deque()
        self._path, self._kind, self._failed_writes, self._open_file = path, kind, failed_writes, open_file
        self._descriptor: int | None = None
        self._end: int | None = None
        """Size of the file with all whole records; None before the file was first opened."""

    def append(self, record: bytes) -> None:
        self.waiting.append(record)
        if len(self.waiting) > MAX_WAITING:
            self.waiting.popleft()
            self._failed_writes.count_lost(self._kind)
        self._write_what_waits()

    def rewind(self, is_kept: Callable[[bytes], bool]) -> list[bytes]:
        """Forget waiting records that are not to be kept, after the file itself was cut. Returns those that still
        wait."""
        self._release()
        self._end = None
        self.waiting = deque(filter(is_kept, self.waiting))
        self._count()
        return list(self.waiting)

    def close(self) -> None:
        """Try once more; what waits then is lost. May be called twice."""
        try:
            if self.waiting:
                self._write_what_waits()
        finally:
            if num_lost := len(self.waiting):
                self._failed_writes.count_lost(self._kind, num_lost)
                self._failed_writes.tell(f"{self._kind}: {num_lost:,} of its records are lost")
            self.waiting.clear()
            self._count()
            self._release()

    def _write_what_waits(self) -> None:
        try:
            while self.waiting:
                self._write(self.waiting[0])
                self.waiting.popleft()
        except OSError as error:
            self._cut_off()
            self._release()
            self._count()
            self._failed_writes.record_failure(self._kind, error, KEPT)
        else:
            self._count()
            self._failed_writes.record_success(self._kind)

    def _write(self, record: bytes) -> None:
        if self._descriptor is None:
            self._open(record)
        assert self._descriptor is not None
        assert self._end is not None
        rest = memoryview(record)
        while rest:  # a full disk takes a part before it raises; so may a signal
            rest = rest[os.write(self._descriptor, rest) :]
        self._end += len(record)

    def _open(self, record: bytes) -> None:
        """Open the file. `record`: the next one, which may have been begun before the last error."""
        self._descriptor = self._open_file(self._path)
        size = os.lseek(self._descriptor, 0, os.SEEK_END)
        end = size if self._end is None else min(size, self._end)
        if size > end and record.startswith(os.pread(self._descriptor, size - end, end)):
            os.ftruncate(self._descriptor, end)
            size = end
        self._end = size  # other bytes were written by another process

    def _cut_off(self) -> None:
        """Cut off a record that is written in part, for processes that read the file; `_open` does so in any case."""
        if self._descriptor is not None and self._end is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _count(self) -> None:
        self._failed_writes.set_waiting(self._kind, len(self.waiting))
