"""A log of which worker worked on which group from when to when: the store sees every stage, since it gives out all
leases.

    lease granted ─▶ granted        rows written ─▶ wrote        once a step the controller ─▶ take

The run's timeline is made of it (`orchestrator/observability/step_trace.py`). It decides nothing: a reader that is late
misses the oldest.
"""

import time
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

MAX_ENTRIES = 20_000
"""The most entries that are kept until a reader takes them. Then the oldest goes, and is counted."""
AT_ONCE = 4_000
"""The most entries taken by one call, which holds the store's loop meanwhile."""


class WorkLog:
    """The entries of the log. Lifecycle: a call for each event, `take` now and then. Times are seconds since the epoch
    on the store's machine."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._begun: dict[int, tuple[str, str, float]] = {}
        """Stage, owner and time of each lease that was not over when it was last looked at."""
        self._done: dict[tuple[int, int], list[Any]] = {}
        """Work done, by lease and group, in the order of the first write."""
        self._admitted: dict[int, float] = {}
        self.num_missed = 0

    def granted(self, lease_id: int, stage: str, owner: str) -> None:
        """Note a lease. Ranks that share a lease are granted it one after the other: the first one counts."""
        self._begun.setdefault(lease_id, (stage, owner, self._clock()))

    def admitted(self, group: int) -> None:
        self._admitted[group] = self._clock()
        self._forget_oldest(self._admitted)

    def wrote(self, lease_id: int, groups: Iterable[int], num_rows: int) -> None:
        """Note that rows of these groups have results. `num_rows`: of all of them together."""
        if lease_id not in self._begun:
            return  # it was over, or is of the store before
        stage, owner, start = self._begun[lease_id]
        now, groups = self._clock(), list(groups)
        for group in groups:
            entry = self._done.setdefault((lease_id, group), [stage, owner, group, start, now, 0.0])
            entry[4] = now
            entry[5] += num_rows / len(groups)
        self._forget_oldest(self._done)

    def since(self, lease_id: int) -> float | None:
        """The time at which a lease was granted."""
        begun = self._begun.get(lease_id)
        return begun[2] if begun is not None else None

    def take(self, held: Collection[int]) -> dict[str, Any]:
        """Take what has been done since the last time: `leases` of [stage, owner, group, start, end, rows], `admitted`
        of [group, time], how many entries were `missed`, whether there is `more` to be taken at once, and the store's
        `now`. `held`: leases that are not over."""
        done, admitted = (_first(entries, AT_ONCE) for entries in (self._done, self._admitted))
        missed, self.num_missed = self.num_missed, 0
        self._begun = {lease: begun for lease, begun in self._begun.items() if lease in held}
        return {
            "now": self._clock(),
            "leases": [entry for _, entry in done],
            "admitted": [[group, at] for group, at in admitted],
            "missed": missed,
            "more": bool(self._done or self._admitted),
        }

    def _forget_oldest(self, entries: dict[Any, Any]) -> None:
        while len(entries) > MAX_ENTRIES:
            del entries[next(iter(entries))]
            self.num_missed += 1


def _first(entries: dict[Any, Any], most: int) -> list[tuple[Any, Any]]:
    """Take entries out, the oldest first."""
    return [(key, entries.pop(key)) for key in list(islice(entries, most))]
