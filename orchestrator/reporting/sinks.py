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
from penstock.orchestrator.recording.appended_file import AppendedFile
from penstock.orchestrator.recording.losses import Losses
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
