"""Where a step's numbers go: the run directory always, TensorBoard and Ray's gauges by configuration.

The controller calls `log_to` once a step. A sink of one's own is any object with these two methods. One that cannot
write (`OSError`: its disk, its connection) costs its own numbers; whatever else it raises ends the run.
"""

import io
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.conf.cluster import TrackingConfig
from penstock.metering.meters import Meters
from penstock.metering.metric import GAUGE, Metric
from penstock.metering.ray_export import Origin, RayExport
from penstock.orchestrator.origins import DRIVER
from penstock.orchestrator.recording.appended_file import AppendedFile
from penstock.orchestrator.recording.losses import Losses
from penstock.orchestrator.recording.run_directory import RunDirectory

STEP_PREFIX = "penstock_step_"
"""Of the gauges of a step's numbers: no metric that actors measure themselves (`metering/table.py`) begins so."""


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
    """An event file in `runs/<name>/tensorboard/`, one record a step.

    torch's `SummaryWriter` writes from a thread, which prints the first error and is no more.
    """

    def __init__(self, directory: RunDirectory) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # late: half a second
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory.tensorboard / name, "tensorboard", directory.losses, _open_below_run)
        self._append(file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()]
        self._append(step=step, summary=self._summary(value=values))

    def _append(self, **fields: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())

    def close(self) -> None:
        self._file.close()


class RayGauges:
    """Gauges `penstock_step_<name>` of the driver: Prometheus and the Ray dashboard read them. Each is handed over
    again and again until the next step, however long that takes, since Ray forgets those that are not."""

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


def log_to(sinks: Iterable[Sink], step: int, metrics: Mapping[str, Any], losses: Losses) -> None:
    """One step to each of them."""
    for sink in sinks:
        with losses.tolerating(type(sink).__name__):
            sink.log(step, metrics)


def close_sinks(sinks: Iterable[Sink], losses: Losses) -> None:
    for sink in sinks:
        with losses.tolerating(type(sink).__name__):
            sink.close()


def _open_below_run(file: Path) -> int:
    """A new file, or one that was let go of. Raises `OSError`; where the run's directory is away, none is made."""
    file.parent.mkdir(exist_ok=True)
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that can be plotted."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and value == value}


def gauge_name(name: str) -> str:
    """`actor/pg_loss` as Prometheus allows it: `penstock_step_actor_pg_loss`."""
    return STEP_PREFIX + re.sub(r"\W", "_", name)


def make_sinks(config: TrackingConfig, directory: RunDirectory) -> list[Sink]:
    """The sinks that the configuration asks for. RayGauges need Ray to be up once `log` is called."""
    sinks: list[Sink] = [JsonLines(directory)]
    if config.tensorboard:
        sinks.append(TensorBoard(directory))
    if config.ray_metrics:
        sinks.append(RayGauges(directory.path.name))
    return sinks
