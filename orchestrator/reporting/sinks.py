"""Where a step's numbers go: the run directory always, TensorBoard and Ray's gauges by configuration.

The controller calls `log` on each sink once a step. One of one's own is any object with these two methods.
"""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from penstock.conf.cluster import TrackingConfig
from penstock.orchestrator.recording.run_directory import RunDirectory


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl of the run directory, which the controller closes."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._directory.log_metrics({"step": step, **metrics})

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `runs/<name>/tensorboard/`."""

    def __init__(self, directory: RunDirectory) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # late: imports TensorFlow's stand-in, about a second

        self._writer = SummaryWriter(str(directory.tensorboard))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class RayGauges:
    """Gauges `penstock_<name>` with the run's name as tag: Prometheus and the Ray dashboard read them."""

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


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be plotted."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and value == value}


def gauge_name(name: str) -> str:
    """`actor/pg_loss` as Prometheus allows it."""
    return "penstock_" + re.sub(r"\W", "_", name)


def make_sinks(config: TrackingConfig, directory: RunDirectory) -> list[Sink]:
    """The sinks that the configuration asks for. RayGauges need Ray to be up once `log` is called."""
    sinks: list[Sink] = [JsonLines(directory)]
    if config.tensorboard:
        sinks.append(TensorBoard(directory))
    if config.ray_metrics:
        sinks.append(RayGauges(directory.path.name))
    return sinks
