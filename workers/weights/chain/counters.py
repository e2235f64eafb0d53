"""Counters of a relay's work since it began, shared by all of its threads."""

import threading
from collections import Counter

NAMES = ("versions", "chunks", "bytes_in", "bytes_out", "damaged", "reparented")
"""Names of counters: versions that have begun; chunks and bytes that came from other nodes or went there; chunks that
came damaged; upstreams that were given up."""


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
