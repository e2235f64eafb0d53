"""Numbers for the cluster's own monitoring."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.orchestrator.reporting.sinks.sink import numbers


class RayGauges:
    """Gauges `penstock_<name>` with the run's name as tag: Prometheus and the Ray dashboard read them. Ray must be up
    once `log` is called."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        from ray.util.metrics import Gauge

        for name, value in numbers(metrics).items():
            if name not in self._gauges:
                gauge = Gauge(gauge_name(name), description=name, tag_keys=("run",))
                gauge.set_default_tags({"run": self._run_name})
                self._gauges[name] = gauge
            self._gauges[name].set(value)

    def close(self) -> None:
        self._gauges.clear()


def gauge_name(name: str) -> str:
    """`actor/pg_loss` as Prometheus allows it."""
    return "penstock_" + re.sub(r"\W", "_", name)
