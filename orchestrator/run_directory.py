"""The files of one run, under `runs/<name>/`: who may write what, and how it stays valid whenever the run stops.

    config.yaml     resolved                  metrics.jsonl   one object a step
    events.jsonl    start, failures, …        samples/        step_N.parquet: what was trained
    timeline.json   Chrome trace              model/          final weights as a HF model
    report.html     plots/                    tensorboard/
    cluster.json    where its actors are      checkpoints/    global_step_N: to go on from

The controller writes through `RunDirectory`; the report reads through the same class. A line is appended by one call,
any other file written under another name and then renamed. A run that is killed leaves whole files and whole lines but
perhaps the last one, since a kill can cut a write short: readers leave such an end out, and the next writer removes it.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import recipe_name, to_yaml
from penstock.orchestrator.reporting.timeline import Timeline

STARTS = ("start", "resume")
"""Events with which a process takes a run up."""
_TAIL = 1 << 16
"""Bytes read at a time when looking for the end of the last whole line."""


class RunDirectory:
    """Created at the start of a run, appended to while it lasts, closed at its end; afterwards opened to be read.

    directory = RunDirectory.create(config)
    directory.event("start", num_steps=100)
    directory.log_metrics({"step": 1, "reward/mean": 0.5})
    directory.write_samples(10, rows.table())
    directory.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.timeline = Timeline()
        self._files: dict[str, int] = {}

    @classmethod
    def create(cls, config: RunConfig, *, now: Callable[[], float] = time.time) -> "RunDirectory":
        """Make the directory of a new run and write its config.yaml. Sets `config.name` if it was null.

        Raises `ConfigError` when a run of that name is there already, or the place cannot be written.
        """
        parent = Path(config.output_dir).expanduser().resolve()
        if config.name is None:
            path = _make_unique(parent, f"{recipe_name(config)}-{datetime.fromtimestamp(now()):%Y%m%d-%H%M%S}")
            config.name = path.name
        else:
            path = parent / _checked_name(config.name)
            if (path / "metrics.jsonl").exists() or (path / "config.yaml").exists():
                raise ConfigError(
                    f"name={config.name}: {path} already holds a run. Add resume=auto to go on with it from its "
                    "newest checkpoint, choose another name=..., or leave it out."
                )
            _make_directory(path)
        directory = cls(path)
        directory.write_text("config.yaml", to_yaml(config))
        return directory

    @classmethod
    def reopen(cls, config: RunConfig, step: int) -> "RunDirectory":
        """The directory of the run called `config.name`, to go on after update `step`: later lines of metrics.jsonl go,
        since those updates are made again. config.yaml becomes this run's."""
        directory = cls.open(Path(config.output_dir).expanduser() / str(config.name))
        kept = [line for line in directory.read_metrics() if int(line.get("step", 0)) <= step]
        directory.write_text("metrics.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        directory.write_text("config.yaml", to_yaml(config))
        return directory

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """An existing run, to be read. Raises `ConfigError` if `path` is none."""
        found = Path(path).expanduser().resolve()
        if not found.is_dir():
            raise ConfigError(f"{path}: there is no such directory. A run is a directory under runs/.")
        if not (found / "config.yaml").is_file():
            raise ConfigError(f"{path}: holds no config.yaml, so it is no run. A run is a directory under runs/.")
        return cls(found)

    @property
    def attempt_name(self) -> str:
        """The run's name, and which time it is that it is started: what a process that was killed has left in a
        cluster is in nobody's way."""
        count = sum(event["kind"] in STARTS for event in self.read_events())
        return self.path.name if count < 2 else f"{self.path.name}-{count}"

    # Where things are.

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def model(self) -> Path:
        """Final weights."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def initial_model(self) -> Path:
        """A model that was made for this run, `model.path=null`."""
        return self.path / "initial_model"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def cluster_file(self) -> Path:
        """For `penstock status`."""
        return self.path / "cluster.json"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    # Writing.

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one step. Values that are no finite numbers become null."""
        self._append("metrics.jsonl", metrics)

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl with the time in UTC."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._append("events.jsonl", {"time": stamp, "kind": kind, **fields})

    def write_samples(self, step: int, table: Any) -> Path:
        """Write a `pyarrow.Table` (or anything with `.table()`, such as `Rows`) as samples/step_N.parquet."""
        from pyarrow import parquet

        table = table.table() if hasattr(table, "table") else table
        target = self.samples / f"step_{step}.parquet"
        target.parent.mkdir(exist_ok=True)
        part = target.with_suffix(".part")
        parquet.write_table(table, part, compression="zstd")
        part.replace(target)
        return target

    def write_text(self, name: str, text: str) -> Path:
        """Write a whole file in one step: readers see the old one or the new one."""
        target = self.path / name
        part = target.with_name(f".{target.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(target)
        return target

    def write_timeline(self) -> None:
        self.write_text("timeline.json", self.timeline.to_json())

    def close(self) -> None:
        """Write the timeline and let go of the files. May be called twice."""
        if self._files:
            self.write_timeline()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = _open_for_lines(self.path / name)
        line = json.dumps({key: _plain(value) for key, value in values.items()}, ensure_ascii=False) + "\n"
        rest = memoryview(line.encode())
        while rest:  # a full disk raises; a signal may make one call write less than all
            rest = rest[os.write(self._files[name], rest) :]

    # Reading.

    def read_config(self) -> dict[str, Any]:
        values = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        return _read_lines(self.metrics_file)

    def read_events(self) -> list[dict[str, Any]]:
        return _read_lines(self.events_file)

    def sample_files(self) -> list[Path]:
        """By step."""
        return sorted(self.samples.glob("step_*.parquet"), key=lambda file: int(re.sub(r"\D", "", file.stem) or 0))


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[\w.+@=-][\w.+@= -]*", name) or name in (".", ".."):
        raise ConfigError(
            f"name={name}: is to be a directory's name: letters, digits, '-', '_', '.'. Its place is output_dir."
        )
    return name


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir: cannot make {path} ({error.strerror}). Set output_dir to a place that can be written."
        ) from None


def _make_unique(parent: Path, stem: str) -> Path:
    """A directory that was not there before: two runs of the same second get two."""
    _make_directory(parent)
    for count in range(1, 1000):
        path = parent / (stem if count == 1 else f"{stem}-{count}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"output_dir={parent}: cannot make {path.name} ({error.strerror}). "
                "Set output_dir to a place that can be written."
            ) from None
        return path
    raise ConfigError(f"{parent / stem}: a thousand runs of that name; set name=...")


def _plain(value: Any) -> Any:
    """As JSON has it: NaN and infinity, which it lacks, become null; numpy's numbers become Python's."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _open_for_lines(file: Path) -> int:
    """Open for appending, after the last whole line: what a killed writer left of another is cut away."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    end = os.lseek(descriptor, 0, os.SEEK_END)
    kept = end
    while kept and b"\n" not in (tail := os.pread(descriptor, min(kept, _TAIL), max(0, kept - _TAIL))):
        kept -= len(tail)
    if kept:
        kept = max(0, kept - _TAIL) + tail.rindex(b"\n") + 1
    if kept != end:
        os.ftruncate(descriptor, kept)
    return descriptor


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that was cut off is left out."""
    if not file.is_file():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines
