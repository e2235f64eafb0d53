"""The declaration of one metric. Names follow Prometheus: a unit at the end, `_total` after it for counters."""

from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
ORIGIN = ("run", "role", "actor")
"""Labels of every metric: the run's name, the role of the process that measures, and its name, such as Rollout-0."""
RAY_PREFIX = "ray_"
"""The prefix that Ray puts before the names of all metrics that it exports."""


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric. Each is one object of `table.py`, and is compared by identity."""

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
