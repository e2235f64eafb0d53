"""Meters: metrics, and the measurements of one process: numbers in memory, which an exporter reads.

Workers, the store and the driver call `add`, `put` and `observe` where things happen; each costs about a microsecond,
and any thread may call it. `ray_export.py` calls `read`. A series is one number, however long the process lives.
"""

import threading
from dataclasses import dataclass
from typing import NamedTuple

COUNTER, GAUGE, SUMMARY = "counter", "gauge", "summary"
ORIGIN = ("run", "run_id", "role", "actor")
"""Labels of every metric: the run's name and its id, the role of the process that measures, and its name, such as
Rollout-0."""
RAY_PREFIX = "ray_"
"""The prefix that Ray puts before the names of all metrics that it exports."""
SUM, COUNT = "_sum", "_count"
"""Endings of the two series of a summary."""


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
    condition: str = ""
    """The condition under which the metric exists at all; empty: always."""

    @property
    def exported(self) -> str:
        """The name under which Prometheus knows the metric."""
        return RAY_PREFIX + self.name


class Series(NamedTuple):
    """One number of a metric: its labels have values."""

    metric: Metric
    labels: tuple[tuple[str, str], ...] = ()
    ending: str = ""
    """`SUM` or `COUNT` of a summary; else empty."""

    @property
    def name(self) -> str:
        return self.metric.name + self.ending


class Meters:
    """Metrics of one process, each as it is since the process began. Lifecycle: used from when it is made.

    meters = Meters()
    meters.add(REWARD_ERRORS, reason="timeout")
    meters.put(ROLLOUT_RUNNING, 12)
    meters.observe(REWARD_LATENCY, 0.25)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Series, float] = {}

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter. An increase of 0 starts the series, so that its first growth is seen."""
        series = _series(metric, COUNTER, labels)
        with self._lock:
            self._increase(series, amount)

    def put(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge to this value from now on."""
        series = _series(metric, GAUGE, labels)
        with self._lock:
            self._values[series] = value

    def observe(self, metric: Metric, value: float, times: int = 1, **labels: str) -> None:
        """Add one value to a summary, or several equal ones."""
        series = _series(metric, SUMMARY, labels)
        with self._lock:
            self._increase(series._replace(ending=SUM), value * times)
            self._increase(series._replace(ending=COUNT), times)

    def read(self) -> dict[Series, float]:
        """All series, with what they have come to."""
        with self._lock:
            return dict(self._values)

    def _increase(self, series: Series, amount: float) -> None:
        self._values[series] = self._values.get(series, 0.0) + amount


def _series(metric: Metric, kind: str, labels: dict[str, str]) -> Series:
    """Return the series. Raises `ValueError` for a use that the table does not declare."""
    if metric.kind != kind or labels.keys() != set(metric.labels):
        raise ValueError(
            f"{metric.name} is a {metric.kind} with the labels {list(metric.labels)}, and was used as a {kind} with "
            f"{list(labels)}. Declare it so in metering/table.py."
        )
    return Series(metric, tuple((name, labels[name]) for name in metric.labels))
