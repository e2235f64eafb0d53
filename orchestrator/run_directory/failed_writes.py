"""Counts and tells what could not be written of a run, which is no reason to end it while training can go on.

    with failed_writes.tolerating("samples"):      # an OSError in here costs these samples
        parquet.write_table(…)

`appended_file.py` reports its records to it, which wait instead of being lost.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

TRIED_AGAIN = "It is lost, and the next is tried."


class FailedWrites:
    """Writes that failed, by kind. Kinds are `metrics`, `events`, `samples`, `timeline`, `tensorboard`, …, the names of
    trackers, and the class of a user's own sink.

    A kind fails from its first error until it can be written again. Both are told once, and the error becomes an event;
    those in between are only counted.
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
        """Lock for uploads, which fail in a thread of their own. Nothing is told while it is held."""
        self._tell: Callable[[str], None] | None = None
        self._untold: list[str] = []

    def tell_to(self, tell: Callable[[str], None]) -> None:
        """Set the function that tells the user; earlier messages are told now."""
        self._tell = tell
        untold, self._untold = self._untold, []
        for text in untold:
            self.tell(text)

    @contextlib.contextmanager
    def tolerating(self, kind: str, advice: str = TRIED_AGAIN, *, is_renewed: bool = False) -> Iterator[None]:
        """Tolerate an `OSError` in the block, which writes one thing of this kind. `advice`: what is told if it cannot
        be written. `is_renewed`: the next one has all that it would have had, so that nothing is lost with it."""
        try:
            yield
        except OSError as error:
            if not is_renewed:
                self.loses(kind)
            self.fails(kind, error, advice)
        else:
            self.works(kind)

    def loses(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self.lost[kind] += count

    def waits(self, kind: str, count: int) -> None:
        with self._lock:
            self.waiting[kind] = count

    def fails(self, kind: str, error: Exception, advice: str) -> None:
        with self._lock:
            is_first = kind not in self._failing
            self._failing.add(kind)
        if is_first:
            self.tell(f"{kind}: cannot be written: {error}. {advice}")
            self._note(kind, error)

    def works(self, kind: str) -> None:
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
