"""The files of one run, under `runs/<name>/`: what is written how, and how it stays valid whenever the run stops.

    config.yaml     resolved                  metrics.jsonl   one object a step
    events.jsonl    start, failures, …        samples/        step_N.parquet: what was trained
    spans.jsonl     busy times of actors      model/          final weights as a HF model
    timeline.json   the same, Chrome trace    state.json      present waits of actors
    report.html     plots/                    tensorboard/
    cluster.json    where its actors are      checkpoints/    global_step_N: to resume from
    run.lock        the process in it         stacks/         of members that were ended, or dumped in a stall
    logs/           what actors printed       threads.json    numbers of actors' threads
    trackers/       their ids of the run      wandb/          files of W&B
    pictures/       those that samples name (`picture_folder.py`)
    run_id          distinguishes runs of the same name
    manifest.json   what decides its bits   code.patch      local changes of the code (`observability/manifest.py`)
    states/         those that a session's loop has saved (`loops/session_policy.py`)

The controller writes through `RunDirectory`; the report reads through the same class. A line is appended by one call
(`failed_writes.py`), any other file written whole (`workers/runtime/local_files.py`): a run that is killed leaves
whole files, and whole lines but perhaps the last one. One process at a time works in it (`run_lock.py`). Once the run
has begun, what cannot be written does not end it (`failed_writes.py`): lines wait until they can be, samples and
timeline are lost. With a URL as output_dir it is a working copy on this machine (`run_place.py`), which `mirror.py`
uploads to the URL.
"""

import contextlib
import errno
import itertools
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from penstock.conf.errors import CheckpointError, ConfigError, PenstockError, RunInUse
from penstock.conf.run import RunConfig
from penstock.conf.secret import hide_in
from penstock.conf.tracking import TrackingConfig
from penstock.orchestrator.run_directory.failed_writes import AppendedFile, FailedWrites
from penstock.orchestrator.run_directory.json_lines import (
    iter_lines,
    line_of,
    open_for_lines,
    read_lines,
    truncate_lines,
)
from penstock.orchestrator.run_directory.mirror import EVENTS, LOGS, METRICS, RECORD, SPANS, STATE, Mirror, url_of
from penstock.orchestrator.run_directory.run_lock import RunLock
from penstock.orchestrator.run_directory.run_place import (
    RunPlace,
    checked_name,
    clear_unused,
    has_results_at,
    new_place,
    place_error,
)
from penstock.orchestrator.run_directory.timeline import Timeline, chrome_trace
from penstock.workers.runtime.local_files import replacing, write_whole

RUN_ID = "run_id"
MADE_AT_START = (
    "config.yaml", EVENTS, "timeline.json", "report.html", "plots", "cluster.json", "initial_model",
    "resumed_store", "resumed_models", "tensorboard", "trackers", "wandb", METRICS, RECORD, SPANS, STATE, LOGS,
    "threads.json", "pictures", RUN_ID, "manifest.json", "code.patch",
)  # fmt: skip
"""Names of what may be there of a run that has no results yet."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Parser of configurations: the one in C, where PyYAML has it, takes a seventh of the time."""


def to_yaml(config: RunConfig) -> str:
    """Every key, resolved and without secrets: what `config.yaml` of a run holds."""
    return str(OmegaConf.to_yaml(_escaped(asdict(config))))


def _escaped(value: Any) -> Any:
    """The value with `${` in texts as it has to be written, since by itself it names another key."""
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(one) for one in value]
    return hide_in(value).replace("${", r"\${") if isinstance(value, str) else value


class RunDirectory:
    """The directory of a run: created at its start, appended to while it lasts, closed at its end; later opened to be
    read.

    directory = RunDirectory.create(config)
    directory.mirror(config.tracking)
    directory.event("start", num_steps=100)
    directory.log_metrics({"step": 1, "reward/mean": 0.5})
    directory.write_samples(10, rows)
    directory.close()
    """

    def __init__(self, path: Path, url: str | None = None) -> None:
        """`url`: the URL that the directory is a working copy of."""
        self.path, self.url = path, url
        self.config_file, self.metrics_file, self.events_file = path / "config.yaml", path / METRICS, path / EVENTS
        self.report, self.plots, self.tensorboard = path / "report.html", path / "plots", path / "tensorboard"
        self.samples, self.checkpoints, self.states = path / "samples", path / "checkpoints", path / "states"
        self.model = path / "model"
        """The directory of the final weights."""
        self.initial_model = path / "initial_model"
        """The directory of a model that was made for this run, `model.path=null`."""
        self.cluster_file = path / "cluster.json"
        """The file with the address of the run's cluster."""
        self.clock: Callable[[], float] = time.time
        """The clock of events, in seconds since the epoch; a simulated run has its own."""
        self.timeline = Timeline()
        self.failed_writes = FailedWrites(
            lambda kind, error: self.event("recording_failed", what=kind, error=str(error))
        )
        self._files: dict[str, AppendedFile] = {}
        self._locks: list[RunLock] = []
        self._mirror: Mirror | None = None
        self._appending = threading.RLock()
        """Lock for appending, since events come from the mirror's thread too."""
        self.owned_by_other = False
        """True once another process is known to have the directory: nothing is written any more."""
        self._is_new = False

    @classmethod
    def create(cls, config: RunConfig, *, now: Callable[[], float] = time.time) -> "RunDirectory":
        """Make the directory of a new run, lock it and write its config.yaml. Sets `config.name` if it was null.

        What a run without results left is replaced. Raises `ConfigError` when a run of that name is there already,
        or the place cannot be written, `RunInUse` when another process has it, `CheckpointError` for a silent URL.
        """
        if config.name is None:
            place = new_place(config, now(), has_results_at)
        else:
            place = RunPlace.of(config.output_dir, checked_name(config.name))
        directory = cls(place.path, place.url)
        directory.lock(place.path, f"name={config.name}")
        directory._is_new = True
        try:
            is_at_url = place.url is not None and not clear_unused(place.url, MADE_AT_START)
            if is_at_url or directory.has_begun:
                raise ConfigError(
                    f"name={config.name}: {place.url if is_at_url else place.path} already holds a run. Add "
                    "resume=auto to go on with it from its newest checkpoint, choose another name=..., or leave it out."
                )
        except PenstockError:
            directory.close()
            raise
        try:
            if directory.config_file.is_file():
                directory._clear()
            directory.write_text("config.yaml", to_yaml(config), synced=True)
        except OSError as error:
            directory.discard()
            raise place_error(place.path, error) from None
        return directory

    @classmethod
    def open(cls, path: str | Path, url: str | None = None) -> "RunDirectory":
        """Open an existing run, to be read. Raises `ConfigError` if `path` is none."""
        found = Path(path).expanduser().resolve()
        if not found.is_dir():
            raise ConfigError(f"{path}: there is no such directory. A run is a directory under runs/.")
        if not (found / "config.yaml").is_file():
            raise ConfigError(f"{path}: holds no config.yaml, so it is no run. A run is a directory under runs/.")
        return cls(found, url)

    @property
    def place(self) -> str:
        """The place where people find the run: its URL, or its directory."""
        return str(self.path) if self.url is None else self.url

    @property
    def full_name(self) -> str:
        """The run's name, after its parent's if it is a run before a run: `sums.warm_start`."""
        parent = RunDirectory(self.path.parent)
        return f"{parent.full_name}.{self.path.name}" if parent.config_file.is_file() else self.path.name

    @cached_property
    def run_id(self) -> str:
        """Eight digits that distinguish runs of the same name on a cluster, and stay when a run is resumed. Made by the
        first process that asks, which is to hold the lock."""
        with contextlib.suppress(OSError):
            return (self.path / RUN_ID).read_text(encoding="utf-8").strip()
        made = secrets.token_hex(4)
        with self.failed_writes.tolerating(RUN_ID, "The run has another id when it is resumed."):
            self.write_text(RUN_ID, made + "\n")
        return made

    @property
    def has_begun(self) -> bool:
        """True if the run has results that would be costly to make again, or if the directory cannot be read."""
        if self.owned_by_other or self.failed_writes.waiting["metrics"]:
            return True
        try:
            results = (self.model, self.checkpoints, self.samples, self.states, *self.path.glob("*/config.yaml"))
            is_here = self.read_metrics() or (self.config_file.is_file() and any(path.exists() for path in results))
            return bool(is_here) or (self.url is not None and has_results_at(self.url))
        except (OSError, CheckpointError):
            return True

    @property
    def is_unused(self) -> bool:
        """True if this process has made the directory, and no results are there."""
        return self._is_new and not self.has_begun

    # Its life.

    def lock(self, place: Path, what: str) -> None:
        """Keep other processes out of `place` until `close`. Raises `RunInUse`, `ConfigError`."""
        try:
            lock = RunLock.take(place, what)
        except OSError as error:
            raise place_error(place, error) from None
        self._locks.append(lock)
        if not lock.is_exclusive:
            self.failed_writes.tell(
                f"{place} is on a file system without locks (flock): nothing keeps a second command out of it. See "
                f"that there is none, or choose a place that has them for {what.partition('=')[0]}."
            )

    def mirror(self, tracking: TrackingConfig) -> None:
        """Start uploading what is written here to the run's URL, if it has one. The directory of a first run is
        uploaded with that of the run it comes before."""
        if self.url is not None and url_of(self.path.parent) is None:
            self._mirror = Mirror(self.path, self.url, tracking, self.failed_writes)
            self._mirror.begin()

    def upload_now(self, timeout_s: float) -> None:
        """Upload all files to the URL, as far as that can be done in time."""
        if self._mirror is not None:
            self._mirror.upload_now(timeout_s)

    def rewind(self, config: RunConfig, step: int | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Go on after step `step`: later lines of metrics.jsonl go, since those steps are taken again; None: none go.
        What was measured of earlier steps meanwhile stays.
        config.yaml becomes this run's. `metrics`: those of that step, for a run that was killed before it had written
        its line. Raises `ConfigError`."""

        def is_kept(line: Mapping[str, Any]) -> bool:
            return step is None or int(line.get("step", 0)) <= step

        try:
            self._rewind(SPANS, is_kept)
            late = list(filter(is_kept, itertools.dropwhile(is_kept, read_lines(self.metrics_file))))
            kept = self._rewind(METRICS, is_kept)
            if (text := to_yaml(config)) != self.config_file.read_text(encoding="utf-8"):
                self.write_text("config.yaml", text, synced=True)
        except OSError as error:
            raise ConfigError(
                f"name={config.name}: cannot go on in {self.path} ({error.strerror}). Make room there, or see whether "
                "its file system answers."
            ) from None
        if metrics and all(line.get("step") != step for line in kept):
            self.log_metrics(metrics)
        for line in late:
            self.log_metrics(line)

    def _rewind(self, name: str, is_kept: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
        """Cut a file of lines, and what waits to be written to it. Returns what stays. Raises `OSError`."""
        kept = truncate_lines(self.path / name, is_kept)
        if (file := self._files.get(name)) is not None:
            kept += map(json.loads, file.rewind(lambda line: is_kept(json.loads(line))))
        return kept

    def discard(self) -> None:
        """Close, and remove what was made: the name is free again. Files that something else wrote stay."""
        if self._mirror is not None:
            self._mirror.discard()
        self._close_files()
        with contextlib.suppress(OSError):
            self._clear()
        for lock in self._locks:
            lock.release(remove=True)
        with contextlib.suppress(OSError):  # something else is in there
            self.path.rmdir()

    def close(self) -> None:
        """Write the timeline and the lines that still wait, upload the rest to the URL, release files and locks. May be
        called twice."""
        with contextlib.ExitStack() as closing:  # of all, whatever one of them raises
            for lock in self._locks:
                closing.callback(lock.release)
            closing.callback(self._close_files)  # again: the mirror's trouble is an event
            if self._mirror is not None:
                closing.callback(self._mirror.abandon if self.owned_by_other else self._mirror.close)
            closing.callback(self._close_files)
            if self._files and not self.owned_by_other:
                self.write_timeline()

    def _close_files(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._files.clear)
            for name in (EVENTS, METRICS, SPANS):  # from the last one on: the others' trouble is an event
                closing.callback(self._close_file, name)

    def _close_file(self, name: str) -> None:
        if name in self._files:
            self._files[name].close()

    def _clear(self) -> None:
        for path in (self.path / name for name in MADE_AT_START):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    # Writing.

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one step. Values that are no finite numbers become null."""
        self._append(METRICS, metrics)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to events.jsonl with the time in UTC."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        stamp = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._append(EVENTS, {"time": stamp, "kind": kind, **fields})

    def log_spans(self, line: Mapping[str, Any]) -> None:
        """Append one step of the timeline (`observability/step_trace.py`)."""
        self._append(SPANS, line)

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Write the present state: which actors are there, and which wait for which."""
        with self.failed_writes.tolerating("state", is_cumulative=True):
            self.write_text(STATE, line_of(state))

    def write_samples(self, step: int, table: Any) -> None:
        """Write a `pyarrow.Table`, or `Rows` with their ids, as samples/step_N.parquet."""
        from pyarrow import parquet

        table = table.table_with_ids() if hasattr(table, "table_with_ids") else table
        target = self.samples / f"step_{step}.parquet"
        with self.failed_writes.tolerating("samples"):
            target.parent.mkdir(exist_ok=True)
            with replacing(target) as part:
                parquet.write_table(table, part, compression="zstd")

    def write_stacks(self, name: str, text: str) -> str:
        """Write the stacks of a member's threads. Returns the file's name in this directory."""
        file = f"stacks/{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.txt"
        with self.failed_writes.tolerating("stacks"):
            (self.path / file).parent.mkdir(exist_ok=True)
            self.write_text(file, text)
        return file

    def write_text(self, name: str, text: str, *, synced: bool = False) -> Path:
        """Write a whole file in one step: readers see the old one or the new one. Raises `OSError`."""
        target = self.path / name
        write_whole(target, text, synced=synced)
        return target

    def write_timeline(self) -> None:
        with self.failed_writes.tolerating("timeline", "It is lost."):
            steps = itertools.chain(iter_lines(self.path / SPANS), self.timeline.rest())
            with replacing(self.path / "timeline.json") as part, part.open("w", encoding="utf-8") as opened:
                opened.writelines(chrome_trace(steps, f"{self.full_name} ({self.run_id})"))

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        with self._appending:
            if name not in self._files:
                kind = name.removesuffix(".jsonl")
                self._files[name] = AppendedFile(self.path / name, kind, self.failed_writes, self._open_for_lines)
            self._files[name].append(hide_in(line_of(values)).encode())  # an error may quote a URL

    def _open_for_lines(self, file: Path) -> int:
        """Open a file of lines. Raises `OSError`; `RunInUse`, the first time, if another process has the directory by
        now."""
        if self.owned_by_other:
            raise OSError(errno.EBUSY, f"{self.path} is in use by another process")
        self.check_held()
        return open_for_lines(file)

    def check_held(self) -> None:
        """Raise `RunInUse` if another process continues the run here: this one was thought dead, or its file system was
        unreachable. Raises `OSError` if the lock cannot be read."""
        for lock in self._locks[:1]:  # its own: the first that was taken
            try:
                lock.check_held(f"name={self.path.name}")
            except RunInUse:
                self.owned_by_other = True
                raise

    # Reading.

    def read_config(self) -> dict[str, Any]:
        values = yaml.load(self.config_file.read_text(encoding="utf-8"), LOADER)
        return values if isinstance(values, dict) else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step. What came later, such as its evaluation's, is in a line of its own in the file."""
        lines: dict[Any, dict[str, Any]] = {}
        for line in read_lines(self.metrics_file):
            lines.setdefault(line.get("step"), {}).update(line)
        return list(lines.values())

    def read_events(self) -> list[dict[str, Any]]:
        return read_lines(self.events_file)

    def read_spans(self) -> list[dict[str, Any]]:
        return read_lines(self.path / SPANS)

    def sample_files(self) -> list[Path]:
        """Files of samples, by step."""
        return sorted(self.samples.glob("step_*.parquet"), key=lambda file: int(re.sub(r"\D", "", file.stem) or 0))
