"""What could not be written of a run: told, counted, and no reason to end it while training can go on.

    with losses.tolerating("samples"):      # an OSError in here costs these samples
        parquet.write_table(…)

Held by `RunDirectory`. `appended_file.py` reports its records to it, which wait instead of being lost.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

TRIED_AGAIN = "It is lost, and the next is tried."


class Losses:
    """Kinds are `metrics`, `events`, `samples`, `timeline`, `tensorboard`, …, and the class of a user's own sink.

    A kind fails from its first error until it can be written again. Both are told once, and the error becomes an event;
    those in between are only counted.
    """

    def __init__(self, note: Callable[[str, OSError], None]) -> None:
        """`note`: hears of the first error of a kind, for events.jsonl."""
        self.lost: Counter[str] = Counter()
        """By kind, what will never be written."""
        self.waiting: Counter[str] = Counter()
        """By kind, records that are kept in memory until they can be written."""
        self._note = note
        self._failing: set[str] = set()
        self._tell: Callable[[str], None] | None = None
        self._untold: list[str] = []

    def tell_to(self, tell: Callable[[str], None]) -> None:
        """Who tells the person; what came before is told now."""
        self._tell = tell
        untold, self._untold = self._untold, []
        for text in untold:
            self.tell(text)

    @contextlib.contextmanager
    def tolerating(self, kind: str, advice: str = TRIED_AGAIN) -> Iterator[None]:
        """The block writes one thing of this kind. `advice`: what is told of one that cannot be written."""
        try:
            yield
        except OSError as error:
            self.lost[kind] += 1
            self.fails(kind, error, advice)
        else:
            self.works(kind)

    def fails(self, kind: str, error: OSError, advice: str) -> None:
        if kind not in self._failing:
            self._failing.add(kind)
            self.tell(f"{kind}: cannot be written: {error}. {advice}")
            self._note(kind, error)

    def works(self, kind: str) -> None:
        if kind in self._failing:
            self._failing.discard(kind)
            self.tell(f"{kind}: can be written again")

    def tell(self, text: str) -> None:
        if self._tell is None:
            self._untold.append(text)
            return
        with contextlib.suppress(OSError):  # a screen that is a file on the same disk
            self._tell(text)

    def metrics(self) -> dict[str, float]:
        return {"recording/lost": float(self.lost.total()), "recording/waiting": float(self.waiting.total())}
