"""The metrics that rules look at, and their findings. Pure. The rules are in `rules.py`."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.diagnosis import DiagnosisConfig

WARNING, HINT = "warning", "hint"


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str
    """A sentence on what was history, with its numbers."""
    advice: str
    level: str = WARNING


class History:
    """The metrics of a run's first steps and of its last ones: rules look at no others, so that a long run's memory
    stays bounded."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._first: dict[str, list[float]] = {}
        """Values of the first steps, by metric."""
        self._last: deque[Mapping[str, Any]] = deque(maxlen=window + 1)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of the next step."""
        for key in metrics:
            known = self._first.setdefault(key, [])
            if len(known) < self.window:
                known += _values([metrics], key)
        self._last.append(metrics)

    def last(self, key: str) -> list[float]:
        """Values of a metric in those of the last steps that have it."""
        return _values(list(self._last)[-self.window :], key)

    def first(self, key: str) -> list[float]:
        """Values of a metric in the first steps that have it: as many as `last` at least."""
        return self._first.get(key, [])

    def increase(self, key: str) -> float:
        """Increase of a counter within the window, for counters that only grow. 0 where it was reset."""
        newest = next(_each(reversed(self._last), key), None)
        if newest is None:
            return 0.0
        return max(0.0, newest - (next(_each(self._last, key)) if len(self._last) > self.window else 0.0))

    def is_throughout(self, key: str) -> bool:
        """Return whether all of the last steps have a metric."""
        return self.is_long_enough and all(line.get(key) is not None for line in list(self._last)[-self.window :])

    def named(self, prefix: str) -> list[str]:
        return [key for key in self._last[-1] if key.startswith(prefix)] if self._last else []

    @property
    def is_long_enough(self) -> bool:
        return len(self._last) >= self.window


Rule = Callable[[History, DiagnosisConfig, int], Finding | None]
"""A rule; its last argument is `max_staleness`."""


def _values(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return list(_each(lines, key))


def _each(lines: Iterable[Mapping[str, Any]], key: str) -> Iterator[float]:
    for line in lines:
        value = line.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield float(value)
