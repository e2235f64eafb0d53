"""Sinks, which take a step's metrics: metrics.jsonl always, others by `tracking.sinks` or of the user's own. Here are
those that talk to no service (metrics.jsonl, TensorBoard's files, gauges for the cluster's own monitoring), and the
table of all, which are opened and closed with a run.

The controller calls `log_to` once a step. A user's sink is any object with the two methods of `Sink`. One that cannot
write (`OSError`: its disk, its connection) loses its own metrics only; any other error ends the run. Trackers, which
talk to a service, are behind a `Sender`, which raises nothing.

Brings metrics to a tracker from a thread of its own, so that a slow, absent or broken one costs the run nothing.

    controller ── log ──▶ queue of at most 1,000 steps ──▶ thread ── open, log, …, finish ──▶ W&B, MLflow, trackio
                   └ NewSteps                                └ TrackerState: trackers/NAME.json, for the next process

What cannot be sent is tried again; what is lost is counted and told by `run_directory/failed_writes.py`.
"""

import contextlib
import io
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from penstock.conf.run import RunConfig
from penstock.conf.tracking import TrackingConfig
from penstock.metering.meters import GAUGE, Meters, Metric
from penstock.metering.ray_export import Origin, RayExport
from penstock.orchestrator.cluster.placement.actors import DRIVER
from penstock.orchestrator.observability.reporting.metrics import GROUPS
from penstock.orchestrator.observability.reporting.sinks.tracker import (
    About,
    End,
    NewSteps,
    Tracker,
    TrackerState,
    numbers,
)
from penstock.orchestrator.observability.reporting.sinks.trackers import Mlflow, Trackio, Wandb
from penstock.orchestrator.run_directory.failed_writes import AppendedFile, FailedWrites
from penstock.orchestrator.run_directory.run_directory import RunDirectory

MAX_WAITING = 1_000
"""Most steps in memory; beyond that the oldest is lost."""
MAX_TRIES = 3
"""Most tries of one step, which may itself be what makes the tracker fail."""
PAUSE_S = 10.0
"""Seconds to wait after an attempt that failed."""
TRIED_AGAIN = f"The run goes on. Up to {MAX_WAITING:,} steps wait for it in memory."
FULL = f"{MAX_WAITING:,} steps wait for it"
MAX_ERROR_CHARS = 300


class Sender:
    """Lifecycle: `begin`, `log` at any time, `finish` when the run has ended, then `close`. Only `close` waits for
    the tracker, until `timeout_s` after `finish`.

        sender = Sender("wandb", Wandb(config.tracking.wandb, 30.0), About.of(config, directory), directory, 30.0)
        sender.begin()
        sender.log(1, {"reward/mean": 0.5})
        sender.finish(End("finished"))
        sender.close()
    """

    def __init__(
        self, name: str, tracker: Tracker, about: About, directory: RunDirectory, timeout_s: float,
        pause_s: float = PAUSE_S, max_waiting: int = MAX_WAITING,
    ) -> None:  # fmt: skip
        self.name = name
        self._tracker, self._about, self._directory, self._failed_writes = (
            tracker,
            about,
            directory,
            directory.failed_writes,
        )
        self._timeout_s, self._pause_s, self._max_waiting = timeout_s, pause_s, max_waiting
        self._state = TrackerState(directory, name)
        self._new = NewSteps(self._state.step)
        self._changed = threading.Condition()
        """Lock of all fields below."""
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._sending = 0
        """Number of steps that the thread has taken out: 0 or 1."""
        self._end: End | None = None
        self._give_up_at = 0.0
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        new = self._new.of(step, {name: value for name, value in numbers(metrics).items() if name != "step"})
        if not new:
            return
        with self._changed:
            self._waiting.append((step, new))
            is_full = self._cut()
            self._changed.notify_all()
        if is_full:
            self._failed_writes.fails(f"{self.name} queue", TimeoutError(FULL), "The oldest of its steps are lost.")

    def finish(self, end: End) -> None:
        with self._changed:
            if self._end is None:
                self._end, self._give_up_at = end, time.monotonic() + self._timeout_s
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until the tracker has everything, or will not get it. May be called twice."""
        self.finish(End("unknown"))
        self._thread.join(max(0.0, self._give_up_at - time.monotonic()))
        with self._changed:
            num_lost = len(self._waiting) + self._sending
            is_late = self._thread.is_alive() and not self._is_abandoned
            self._is_abandoned = True
            self._waiting.clear()
            self._sending = 0
        if num_lost:
            self._failed_writes.loses(self.name, num_lost)
        self._failed_writes.waits(self.name, 0)
        if is_late:
            self._failed_writes.tell(
                f"{self.name}: has not closed within {self._timeout_s:g} s, and is left. {_lacks(num_lost)}"
            )
        elif num_lost:
            self._failed_writes.tell(f"{self.name}: {_lacks(num_lost)}")

    # In the thread.

    def _run(self) -> None:
        while not self._attempt(self._open):
            if self._end is not None:
                return
            self._pause()
        tries = 0
        while (entry := self._next()) is not None:
            if self._attempt(lambda: self._log(*entry)):
                tries = 0
                continue
            tries += 1
            is_lost = tries == MAX_TRIES or self._end is not None
            self._put_back(entry, is_lost)
            tries = 0 if is_lost else tries
            self._pause()
        if not self._is_abandoned:
            self._attempt(self._finish)

    def _open(self) -> None:
        opened = self._tracker.open(self._about, self._state.id)
        if self._is_abandoned:
            return
        self._state.keep(opened.id)
        self._directory.event("tracked", tracker=self.name, id=opened.id, place=opened.place)
        self._failed_writes.tell(f"{self.name}: {opened.place}")

    def _log(self, step: int, new: Mapping[str, float]) -> None:
        self._tracker.log(step, new)
        if not self._is_abandoned:  # or the directory may be another process's
            self._state.keep_step(step)

    def _finish(self) -> None:
        assert self._end is not None
        self._tracker.finish(self._end)

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Make a call. Returns whether it succeeded. What it raises is told."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run, whatever its package raises
            if not self._is_abandoned:
                self._failed_writes.fails(self.name, _short(error), TRIED_AGAIN if self._end is None else "")
            return False
        if not self._is_abandoned:
            self._failed_writes.works(self.name)
        return True

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """The next step to send; None at the end."""
        with self._changed:
            self._sending = 0
            self._changed.wait_for(lambda: self._waiting or self._end is not None or self._is_abandoned)
            entry = self._waiting.popleft() if self._waiting and not self._is_abandoned else None
            self._sending = 0 if entry is None else 1
            self._failed_writes.waits(self.name, len(self._waiting))
        return entry

    def _put_back(self, entry: tuple[int, dict[str, float]], is_lost: bool) -> None:
        with self._changed:
            if self._is_abandoned:
                return
            self._sending = 0
            if is_lost:
                self._failed_writes.loses(self.name)
            else:
                self._waiting.appendleft(entry)
                self._cut()

    def _cut(self) -> bool:
        """Drop the oldest step if there are too many. Returns whether there were."""
        is_full = len(self._waiting) > self._max_waiting
        if is_full:
            self._waiting.popleft()
            self._failed_writes.loses(self.name)
        self._failed_writes.waits(self.name, len(self._waiting))
        return is_full

    def _pause(self) -> None:
        """Wait until the next attempt; once the run has ended, do not."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or self._is_abandoned, self._pause_s)


def _lacks(num_lost: int) -> str:
    return f"It lacks {num_lost:,} steps; metrics.jsonl has them." if num_lost else "It has every step."


def _short(error: Exception) -> Exception:
    """The error with the first line of its message: packages put whole pages into theirs."""
    lines = str(error).strip().splitlines()
    return RuntimeError(f"{type(error).__name__}: {lines[0][:MAX_ERROR_CHARS]}" if lines else type(error).__name__)


STEP_PREFIX = "penstock_step_"
"""Prefix of the gauges of a step's metrics: no metric that actors measure themselves (`metering/table.py`) has it."""


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


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
TRACKERS: Mapping[str, Callable[[TrackingConfig], Tracker]] = {
    "wandb": lambda tracking: Wandb(tracking.wandb, tracking.close_timeout_s),
    "mlflow": lambda tracking: Mlflow(tracking.mlflow),
    "trackio": lambda tracking: Trackio(tracking.trackio),
}


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
