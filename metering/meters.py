"""Meters: metrics, and the measurements of one process, numbers in memory, until an exporter takes them out.

Workers, the store and the driver call `add`, `put` and `observe` where things happen; each costs about a microsecond,
and any thread may call it. `ray_export.py` calls `drain`. Without an exporter the numbers stay few: a total, a value,
or a sample of `MAX_OBSERVATIONS` for each series.
"""

import random
import threading
from dataclasses import dataclass, field

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
ORIGIN = ("run", "role", "actor")
"""Labels of every metric: the run's name, the role of the process that measures, and its name, such as Rollout-0."""
RAY_PREFIX = "ray_"
"""The prefix that Ray puts before the names of all metrics that it exports."""
MAX_OBSERVATIONS = 32
"""The most observations that a series keeps between two drains. Of more, a uniform sample is kept: quantiles and means
stay what they are, and the count is too low. An observation costs Ray up to 50 us."""


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric, declared. Each is one object of `table.py`, and is compared by identity. Names follow Prometheus: a
    unit at the end, `_total` after it for counters."""

    name: str
    kind: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    """Labels besides those of `ORIGIN`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""
    condition: str = ""
    """The condition under which the metric exists at all; empty: always."""

    @property
    def exported(self) -> str:
        """The name under which Prometheus knows the metric."""
        return RAY_PREFIX + self.name


Series = tuple[Metric, tuple[tuple[str, str], ...]]
"""A metric, with its labels and their values."""


@dataclass
class Drained:
    """Measurements since the last drain."""

    counts: dict[Series, float] = field(default_factory=dict)
    """Growth of each counter. 0 for a series that is new."""
    values: dict[Series, float] = field(default_factory=dict)
    """Values of all gauges, also of those that have not changed."""
    observed: dict[Series, list[float]] = field(default_factory=dict)


class Meters:
    """Metrics of one process. Lifecycle: used from when it is made; `drain` by one caller, at any time.

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
        """Increase a counter. An increase of 0 starts the series, so that its first growth is seen."""
        series = _series(metric, COUNTER, labels)
        with self._lock:
            self._counts[series] = self._counts.get(series, 0.0) + amount

    def put(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge to this value from now on."""
        series = _series(metric, GAUGE, labels)
        with self._lock:
            self._values[series] = value

    def observe(self, metric: Metric, value: float, times: int = 1, **labels: str) -> None:
        """Add one value to a histogram, or several equal ones."""
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
    """A uniform sample of `MAX_OBSERVATIONS` of the values taken (Vitter 1985, algorithm R)."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self._num_seen = 0
        self._random = random.Random(0)  # of its own: that of the process is its workers'

    def take(self, value: float) -> None:
        self._num_seen += 1
        if len(self.kept) < MAX_OBSERVATIONS:
            self.kept.append(value)
        elif (place := self._random.randrange(self._num_seen)) < MAX_OBSERVATIONS:
            self.kept[place] = value


def _series(metric: Metric, kind: str, labels: dict[str, str]) -> Series:
    """Return the series. Raises `ValueError` for a use that the table does not declare."""
    if metric.kind != kind or labels.keys() != set(metric.labels):
        raise ValueError(
            f"{metric.name} is a {metric.kind} with the labels {list(metric.labels)}, and was used as a {kind} with "
            f"{list(labels)}. Declare it so in metering/table.py."
        )
    return metric, tuple((name, labels[name]) for name in metric.labels)
