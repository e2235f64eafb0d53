"""One metric as it is declared. The names follow Prometheus: a unit at the end, `_total` after it for counters."""

from dataclasses import dataclass

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
ORIGIN = ("run", "role", "actor")
"""Labels of every metric: the run's name, the role of who measures, and its name, such as Rollout-0."""
RAY_PREFIX = "ray_"
"""Ray puts it before the names of all metrics that it exports."""


@dataclass(frozen=True, eq=False)
class Metric:
    """Each is one object of `table.py`, and compared as such."""

    name: str
    kind: str
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    """Besides those of `ORIGIN`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""
    condition: str = ""
    """When it is there at all; empty: always."""

    @property
    def exported(self) -> str:
        """As Prometheus knows it."""
        return RAY_PREFIX + self.name
