"""The sink that exports metrics to the cluster's own monitoring."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.metering.meters import GAUGE, Meters, Metric
from penstock.metering.ray_export import Origin, RayExport
from penstock.orchestrator.cluster.origins import DRIVER
from penstock.orchestrator.observability.reporting.sinks.sink import numbers

STEP_PREFIX = "penstock_step_"
"""Prefix of the gauges of a step's metrics: no metric that actors measure themselves (`metering/table.py`) has it."""


class RayGauges:
    """Gauges `penstock_step_<name>` of the driver: Prometheus and the Ray dashboard read them. Each is handed over
    again and again until the next step, however long that takes, since Ray forgets those that are not. Ray must be up
    once `log` is called."""

    def __init__(self, run_name: str) -> None:
        self._meters = Meters()
        self._export = RayExport(self._meters, Origin(run_name, DRIVER, DRIVER))
        self._metrics: dict[str, Metric] = {}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            if name not in self._metrics:
                self._metrics[name] = Metric(gauge_name(name), GAUGE, "", name)
            self._meters.put(self._metrics[name], value)
        self._export.start()

    def close(self) -> None:
        self._export.close()


def gauge_name(name: str) -> str:
    """The name of a gauge as Prometheus allows it: `penstock_step_actor_pg_loss` for `actor/pg_loss`."""
    return STEP_PREFIX + re.sub(r"\W", "_", name)
