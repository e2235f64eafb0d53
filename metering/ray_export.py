"""Export of a process's measurements to Ray, whose agent on the node serves them to Prometheus. The only module here
that knows Ray.

A thread does it once a second, so no worker ever waits for it. Every series is a gauge of Ray's, totals too: Ray
forgets a gauge that is not set for two of its intervals (20 s), but keeps counters and histograms of ended processes as
long as the node lives. Where there is no agent, Ray drops what it is given.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from penstock.metering.meters import ORIGIN, Meters, Series

PERIOD_S = 1.0


@dataclass(frozen=True)
class Origin:
    """The process that measures. Plain data, so that it crosses Ray."""

    run: str
    """Name of the run."""
    run_id: str
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
    if origin is None:
        yield meters
        return
    export = RayExport(meters, origin)
    export.start()
    try:
        yield meters
    finally:
        export.close()


class RayExport:
    """The thread that exports. Lifecycle: `start`, `close`. `flush` by itself does once what the thread does once a
    second."""

    def __init__(self, meters: Meters, origin: Origin) -> None:
        self._meters = meters
        self._origin = asdict(origin)
        self._gauges: dict[str, Any] = {}
        """Ray's gauges, by the names of series."""
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
        for series, value in self._meters.read().items():
            self._gauge(series).set(value, self._origin | dict(series.labels))

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self.flush()
        self.flush()

    def _gauge(self, series: Series) -> Any:
        from ray.util.metrics import Gauge  # late: the store's processes import this without Ray

        if series.name not in self._gauges:
            metric = series.metric
            self._gauges[series.name] = Gauge(series.name, metric.description, (*ORIGIN, *metric.labels))
        return self._gauges[series.name]
