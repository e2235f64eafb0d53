"""Sinks, which take a step's metrics: metrics.jsonl always, others by `tracking.sinks` or of the user's own. Here are
those that talk to no service (metrics.jsonl, TensorBoard's files, gauges for the cluster's own monitoring), and the
opening and closing of all with a run.

The controller calls `log_to` once a step. A user's sink is any object with the two methods of `Sink`. One that cannot
write (`OSError`: its disk, its connection) loses its own metrics only; any other error ends the run. Those that talk to
a service are behind a `Sender` of `trackers.py`, which raises nothing.
"""

import contextlib
import io
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from penstock.conf.run import RunConfig
from penstock.conf.tracking import TrackingConfig
from penstock.metering.meters import GAUGE, Meters, Metric
from penstock.metering.ray_export import Origin, RayExport
from penstock.orchestrator.cluster.placement.actors import DRIVER
from penstock.orchestrator.observability.reporting.metrics import GROUPS
from penstock.orchestrator.observability.reporting.trackers import TRACKERS, About, End, Sender, numbers
from penstock.orchestrator.run_directory.failed_writes import AppendedFile, FailedWrites
from penstock.orchestrator.run_directory.run_directory import RunDirectory

STEP_PREFIX = "penstock_step_"
"""Prefix of the gauges of a step's metrics: no metric that actors measure themselves (`metering/table.py`) has it."""


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class EndingSink(Sink, Protocol):
    """A sink that can end the run."""

    @property
    def is_over(self) -> bool:
        """True once no step is needed after the one that was logged last."""


def end_run(sinks: Iterable[Sink]) -> bool:
    """Return whether a sink ends the run."""
    return any(isinstance(sink, EndingSink) and sink.is_over for sink in sinks)


def log_to(sinks: Iterable[Sink], step: int, metrics: Mapping[str, Any], failed_writes: FailedWrites) -> None:
    """Give one step to each sink."""
    for sink in sinks:
        with failed_writes.tolerating(type(sink).__name__):
            sink.log(step, metrics)


def close_sinks(sinks: Iterable[Sink], failed_writes: FailedWrites) -> None:
    for sink in sinks:
        with failed_writes.tolerating(type(sink).__name__):
            sink.close()


class JsonLines:
    """The sink that every run has: metrics.jsonl of the run directory, which the controller closes."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._directory.log_metrics({"step": step, **metrics})

    def close(self) -> None: ...


class TensorBoard:
    """An event file in `runs/<name>/tensorboard/`, one record a step. It is written without torch's `SummaryWriter`,
    which writes from a thread that prints the first error and ends."""

    def __init__(self, directory: RunDirectory) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # late: half a second
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory.tensorboard / name, "tensorboard", directory.failed_writes, _open_below_run)
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
    """Gauges `penstock_step_<name>` of the driver, of the metrics in `tracking.ray_metrics`: Prometheus and the Ray
    dashboard read them. Each is handed over again and again until the next step, however long that takes, since Ray
    forgets those that are not. Ray must be up once `log` is called."""

    def __init__(self, directory: RunDirectory, patterns: Sequence[str]) -> None:
        """`patterns`: those of the metrics' names."""
        self._meters, self._patterns = Meters(), patterns
        self._export = RayExport(self._meters, Origin(directory.full_name, directory.run_id, DRIVER, DRIVER))
        self._gauges: dict[str, Metric] = {}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            if any(fnmatchcase(name, pattern) for pattern in self._patterns):
                exported, labels = gauge_of(name)
                gauge = self._gauges.setdefault(exported, Metric(exported, GAUGE, "", name, tuple(labels)))
                self._meters.put(gauge, value, **labels)
        self._export.start()

    def close(self) -> None:
        self._export.close()


def gauge_of(name: str) -> tuple[str, dict[str, str]]:
    """The name and the labels of a metric's gauge, as Prometheus allows them. An engine's name is a label.

    >>> gauge_of("actor/pg_loss"), gauge_of("rollout/groups/Rollout-0")
    (('penstock_step_actor_pg_loss', {}), ('penstock_step_rollout_groups', {'engine': 'Rollout-0'}))
    """
    head, is_of_engine, engine = name.partition(GROUPS)
    labels = {"engine": engine} if is_of_engine and not head else {}
    return STEP_PREFIX + re.sub(r"\W", "_", GROUPS.rstrip("/") if labels else name), labels


FILES: Mapping[str, Callable[[RunDirectory, TrackingConfig], Sink]] = {
    "tensorboard": lambda directory, _: TensorBoard(directory),
    "ray": lambda directory, tracking: RayGauges(directory, tracking.ray_metrics),
}
"""Sinks of `tracking.sinks` that talk to no service, by name."""


@contextlib.contextmanager
def opened_sinks(config: RunConfig, directory: RunDirectory, own: Sequence[Sink] = ()) -> Iterator[list[Sink]]:
    """Open metrics.jsonl, the sinks that the configuration asks for, and `own`. They are told how the run has ended by
    what ends the block, and closed."""
    sinks: list[Sink] = [*own, JsonLines(directory)]
    senders: list[Sender] = []
    try:
        sinks += [FILES[name](directory, config.tracking) for name in config.tracking.sinks if name in FILES]
        for name in (name for name in config.tracking.sinks if name in TRACKERS):
            tracker, about = TRACKERS[name](config.tracking), About.of(config, directory)
            senders.append(Sender(name, tracker, about, directory, config.tracking.close_timeout_s))
            senders[-1].begin()
        yield [*sinks, *senders]
    except BaseException as error:
        _tell_end(senders, error, directory)
        raise
    else:
        _tell_end(senders, None, directory)
    finally:
        close_sinks([*senders, *sinks], directory.failed_writes)


def _tell_end(senders: Sequence[Sender], error: BaseException | None, directory: RunDirectory) -> None:
    """Tell the end to all senders before any is waited for: they share the deadline."""
    if senders:
        end = End.of(error, directory)
        for sender in senders:
            sender.finish(end)


def _open_below_run(file: Path) -> int:
    """Open a new file, or one that was closed before. Raises `OSError`; where the run's directory is away, none is
    made."""
    file.parent.mkdir(exist_ok=True)
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
