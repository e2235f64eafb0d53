"""What one process has measured: numbers in memory, taken out by whoever exports them.

Workers, the store and the driver call `add`, `put` and `observe` where things happen; each costs about a microsecond,
and may be called by any thread. `ray_export.py` calls `drain`. Where nobody does, the numbers stay few: a total, a
value, or a sample of `MOST_OBSERVATIONS` for each series.
"""

import random
import threading
from dataclasses import dataclass, field

from penstock.metering.metric import COUNTER, GAUGE, HISTOGRAM, Metric

MOST_OBSERVATIONS = 32
"""Of a series between two drains. Of more, a sample is kept in which each is as likely: quantiles and means stay what
they are, and the count is too low. An observation costs Ray up to 50 us."""
Series = tuple[Metric, tuple[tuple[str, str], ...]]
"""A metric, with its labels and their values."""


@dataclass
class Drained:
    """What was measured since the last time."""

    counts: dict[Series, float] = field(default_factory=dict)
    """Grown by so much. 0 for a series that is new."""
    values: dict[Series, float] = field(default_factory=dict)
    """All of them, also those that have not changed."""
    observed: dict[Series, list[float]] = field(default_factory=dict)


class Meters:
    """Lifecycle: used from when it is made; `drain` by one caller, at any time.

    meters = Meters()
    meters.add(REWARD_ERRORS, reason="timeout")
    meters.put(ROLLOUT_RUNNING, 12)
    meters.observe(REWARD_LATENCY, 0.25)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Series, float] = {}
        self._values: dict[Series, float] = {}
        self._observed: dict[Series, _Sample] = {}

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """A counter grows. 0 has the series begin, so that its first growth is seen."""
        series = _series(metric, COUNTER, labels)
        with self._lock:
            self._counts[series] = self._counts.get(series, 0.0) + amount

    def put(self, metric: Metric, value: float, **labels: str) -> None:
        """A gauge has this value from now on."""
        series = _series(metric, GAUGE, labels)
        with self._lock:
            self._values[series] = value

    def observe(self, metric: Metric, value: float, times: int = 1, **labels: str) -> None:
        """One more value of a histogram, or several alike."""
        series = _series(metric, HISTOGRAM, labels)
        with self._lock:
            sample = self._observed.get(series)
            if sample is None:  # not `setdefault`: one that is made for nothing costs more than all else here
                sample = self._observed[series] = _Sample()
            for _ in range(times):
                sample.take(value)

    def drain(self) -> Drained:
        with self._lock:
            counts, self._counts = self._counts, {}
            observed, self._observed = self._observed, {}
            return Drained(counts, dict(self._values), {series: sample.kept for series, sample in observed.items()})


class _Sample:
    """`MOST_OBSERVATIONS` of those that come, each as likely (Vitter 1985, algorithm R)."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self._num_seen = 0
        self._random = random.Random(0)  # of its own: that of the process is its workers'

    def take(self, value: float) -> None:
        self._num_seen += 1
        if len(self.kept) < MOST_OBSERVATIONS:
            self.kept.append(value)
        elif (place := self._random.randrange(self._num_seen)) < MOST_OBSERVATIONS:
            self.kept[place] = value


def _series(metric: Metric, kind: str, labels: dict[str, str]) -> Series:
    """Raises `ValueError` for a use that the table does not declare."""
    if metric.kind != kind or labels.keys() != set(metric.labels):
        raise ValueError(
            f"{metric.name} is a {metric.kind} with the labels {list(metric.labels)}, and was used as a {kind} with "
            f"{list(labels)}. Declare it so in metering/table.py."
        )
    return metric, tuple((name, labels[name]) for name in metric.labels)
