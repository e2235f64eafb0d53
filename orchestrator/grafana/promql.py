"""PromQL over declared metrics, so that no query names a metric or a label that is not there. Pure; used by `panels.py`
and `rules.py`.

A series of Ray's is one process's. A member that was replaced leaves the counters of its processes behind, which grow
no more, so rates are summed by actor before anything else is made of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.metering.metric import COUNTER, GAUGE, HISTOGRAM, ORIGIN, Metric


@dataclass(frozen=True)
class Scope:
    """Which series, and over what time rates are taken."""

    where: str
    window: str

    def value(self, metric: Metric, by: Sequence[str], how: str = "max") -> str:
        """Of a gauge."""
        _check(metric, GAUGE, by)
        return f"{how} by ({', '.join(by)}) ({self._series(metric.exported)})"

    def average(self, metric: Metric, by: Sequence[str]) -> str:
        """Of a gauge, over the window."""
        _check(metric, GAUGE, by)
        return f"max by ({', '.join(by)}) (avg_over_time({self._series(metric.exported)}[{self.window}]))"

    def rate(self, metric: Metric, by: Sequence[str], having: str = "") -> str:
        """Of a counter, by the second. `having`: a further condition on labels."""
        _check(metric, COUNTER, by)
        return self._rate(metric.exported, by, having)

    def growth(self, metric: Metric, by: Sequence[str], window: str = "") -> str:
        """Of a counter, within the window, or within another."""
        _check(metric, COUNTER, by)
        return f"sum by ({', '.join(by)}) (increase({self._series(metric.exported)}[{window or self.window}]))"

    def sum_rate(self, metric: Metric, by: Sequence[str], having: str = "") -> str:
        """Of a histogram: what all values add up to, by the second."""
        _check(metric, HISTOGRAM, by)
        return self._rate(f"{metric.exported}_sum", by, having)

    def mean(self, metric: Metric, by: Sequence[str]) -> str:
        """Of the values of a histogram."""
        _check(metric, HISTOGRAM, by)
        return f"{self.sum_rate(metric, by)} / {self._rate(f'{metric.exported}_count', by)}"

    def quantile(self, share: float, metric: Metric, by: Sequence[str] = ()) -> str:
        """Of the values of a histogram, as exact as its buckets are."""
        _check(metric, HISTOGRAM, by)
        return f"histogram_quantile({share:g}, {self._rate(f'{metric.exported}_bucket', (*by, 'le'))})"

    def _rate(self, name: str, by: Sequence[str], having: str = "") -> str:
        return f"sum by ({', '.join(by)}) (rate({self._series(name, having)}[{self.window}]))"

    def _series(self, name: str, having: str = "") -> str:
        conditions = ",".join(part for part in (having, self.where) if part)
        return f"{name}{{{conditions}}}" if conditions else name


WAITING = 'phase="wait"'
"""Of a rank's step: for its batch."""
PANELS = Scope('run=~"$run",SessionName=~"$SessionName"', "$__rate_interval")
"""Of a dashboard: what its variables choose."""


def over(window: str) -> Scope:
    """Of a rule: all runs."""
    return Scope("", window)


def _check(metric: Metric, kind: str, by: Sequence[str]) -> None:
    """Raises `ValueError` for a query that the declaration does not bear."""
    if metric.kind != kind or not set(by) <= {*ORIGIN, *metric.labels}:
        raise ValueError(f"{metric.name} is a {metric.kind} with {metric.labels}; asked for as a {kind} by {by}.")
