"""PromQL over declared metrics, so that no query names a metric or a label that is not there. Pure.

A series of Ray's is one process's, and ends with it. The process that replaces another has the same actor, so rates are
summed by actor before anything else is made of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.metering.meters import COUNT, COUNTER, GAUGE, ORIGIN, SUM, SUMMARY, Metric


@dataclass(frozen=True)
class Scope:
    """A selection of series, and the time over which rates are taken."""

    where: str
    window: str

    def value(self, metric: Metric, by: Sequence[str], how: str = "max") -> str:
        """Value of a gauge."""
        _check(metric, GAUGE, by)
        return f"{how} by ({', '.join(by)}) ({self._series(metric.exported)})"

    def average(self, metric: Metric, by: Sequence[str]) -> str:
        """Average of a gauge, over the window."""
        _check(metric, GAUGE, by)
        return f"max by ({', '.join(by)}) (avg_over_time({self._series(metric.exported)}[{self.window}]))"

    def rate(self, metric: Metric, by: Sequence[str], having: str = "") -> str:
        """Rate of a counter, by the second. `having`: a further condition on labels."""
        _check(metric, COUNTER, by)
        return self._rate(metric.exported, by, having)

    def growth(self, metric: Metric, by: Sequence[str], window: str = "") -> str:
        """Growth of a counter within the window, or within another. A series that has begun within it has grown from 0,
        which `increase` does not see."""
        _check(metric, COUNTER, by)
        now = f"sum by ({', '.join(by)}) ({self._series(metric.exported)}"
        return f"{now}) - ({now} offset {window or self.window}) or 0 * {now}))"

    def mean(self, metric: Metric, by: Sequence[str]) -> str:
        """Mean of the values of a summary."""
        _check(metric, SUMMARY, by)
        return f"{self._rate(metric.exported + SUM, by)} / {self._rate(metric.exported + COUNT, by)}"

    def _rate(self, name: str, by: Sequence[str], having: str = "") -> str:
        return f"sum by ({', '.join(by)}) (rate({self._series(name, having)}[{self.window}]))"

    def _series(self, name: str, having: str = "") -> str:
        conditions = ",".join(part for part in (having, self.where) if part)
        return f"{name}{{{conditions}}}" if conditions else name


RUN = ("run", "run_id")
"""Labels of one run: two may have one name on one cluster."""
ACTOR = (*RUN, "actor")
WAITING = 'phase="wait"'
"""Condition on the phase of a rank's step in which it waits for its batch."""
PANELS = Scope('run=~"$run",run_id=~"$run_id",SessionName=~"$SessionName"', "$__rate_interval")
"""Scope of a dashboard: the series that its variables choose."""


def over(window: str) -> Scope:
    """The scope of a rule: all runs, over a window."""
    return Scope("", window)


def _check(metric: Metric, kind: str, by: Sequence[str]) -> None:
    """Raise `ValueError` for a query that does not fit the metric's declaration."""
    if metric.kind != kind or not set(by) <= {*ORIGIN, *metric.labels}:
        raise ValueError(f"{metric.name} is a {metric.kind} with {metric.labels}; asked for as a {kind} by {by}.")
