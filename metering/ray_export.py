"""Export of a process's measurements to Ray, whose agent on the node serves them to Prometheus. The only module here
that knows Ray.

A thread does it once a second, so no worker ever waits for it. Ray forgets a gauge that is not set again within its
interval (10 s), and so those of a process that has ended. Where there is no agent, Ray drops what it is given.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.metering.meters import COUNTER, GAUGE, ORIGIN, Meters, Metric, Series

PERIOD_S = 1.0
ALMOST_NOTHING = sys.float_info.min
"""The smallest increment. Ray's counters can only grow, and do not exist before they do. This starts one: adding any
number to it gives that number."""


@dataclass(frozen=True)
class Origin:
    """The process that measures. Plain data, so that it crosses Ray."""

    run: str
    role: str
    actor: str


def exported(origin: Origin | None) -> Meters:
    """Return the meters of an actor, exported until its process ends. Without an origin they are exported nowhere."""
    meters = Meters()
    if origin is not None:
        RayExport(meters, origin).start()
    return meters


@contextmanager
def exporting(origin: Origin | None) -> Iterator[Meters]:
    """Export the driver's meters within the block. The driver is connected to Ray there, and maybe not afterwards."""
    meters = Meters()
    export = RayExport(meters, origin) if origin is not None else None
    if export is not None:
        export.start()
    try:
        yield meters
    finally:
        if export is not None:
            export.close()


class RayExport:
    """The thread that exports. Lifecycle: `start`, `close`. `flush` by itself does once what the thread does once a
    second."""

    def __init__(self, meters: Meters, origin: Origin) -> None:
        self._meters = meters
        self._origin = {"run": origin.run, "role": origin.role, "actor": origin.actor}
        self._instruments: dict[Metric, Any] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meters", daemon=True)

    def start(self) -> None:
        """Start the thread. A second time changes nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread. Measurements until now are handed over, if it was ever started."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10 * PERIOD_S)

    def flush(self) -> None:
        drained = self._meters.drain()
        for series, grown in drained.counts.items():
            self._instrument(series).inc(grown or ALMOST_NOTHING, self._tags(series))
        for series, value in drained.values.items():
            self._instrument(series).set(value, self._tags(series))
        for series, values in drained.observed.items():
            for value in values:
                self._instrument(series).observe(value, self._tags(series))

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.flush()
        self.flush()

    def _tags(self, series: Series) -> dict[str, str]:
        return self._origin | dict(series[1])

    def _instrument(self, series: Series) -> Any:
        metric = series[0]
        if metric not in self._instruments:
            self._instruments[metric] = _made(metric)
        return self._instruments[metric]


def _made(metric: Metric) -> Any:
    from ray.util.metrics import Counter, Gauge, Histogram  # late: the store's processes import this without Ray

    keys = (*ORIGIN, *metric.labels)
    if metric.kind == COUNTER:
        return Counter(metric.name, metric.description, keys)
    if metric.kind == GAUGE:
        return Gauge(metric.name, metric.description, keys)
    return Histogram(metric.name, metric.description, list(metric.buckets), keys)
