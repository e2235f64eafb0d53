"""Which runs there are below a directory, and each in one line: as much as the beginning and the end of its files tell.

Nothing is read twice that has not changed, so a look at hundreds of runs costs a look at their files' times.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from penstock.orchestrator.recording.json_lines import first_line, last_lines
from penstock.orchestrator.recording.run_lock import FILE as LOCK
from penstock.orchestrator.recording.turns import last_turn

TAIL_BYTES = 1 << 18
"""Of a file's end, in which the newest values are looked for."""
DEPTH = 3
"""Directories below a place in which runs are looked for."""
FINISHED, RUNNING, FAILED, INTERRUPTED, LOST = "finished", "running", "failed", "interrupted", "lost"
UNFINISHED = "unfinished"
ENDED = {"end": FINISHED, "failed": FAILED, "interrupted": INTERRUPTED}
"""By the event with which a process has left it."""


@dataclass(frozen=True)
class RunLine:
    """A run, for the table of runs. None: not known (yet)."""

    id: str
    """Its path below the place that was given; "." for the place itself."""
    name: str
    state: str
    """running, finished, failed, interrupted; lost: its process is gone without a word; unfinished: of a copy, where
    nothing tells whether somebody works in it."""
    recipe: str | None = None
    algorithm: str | None = None
    model: str | None = None
    started: str | None = None
    """UTC, ISO 8601."""
    seconds: float | None = None
    """From its first event to its last."""
    step: int | None = None
    max_steps: int | None = None
    accuracy: float | None = None
    reward: float | None = None
    samples_per_s: float | None = None
    error: str | None = None
    """What it failed with."""


class Runs:
    """Those below one place. `lines` as often as one likes."""

    def __init__(self, place: Path) -> None:
        self.place = place.expanduser().resolve()
        self._known: dict[Path, tuple[tuple[Any, ...], RunLine]] = {}

    def lines(self) -> list[RunLine]:
        """The newest first."""
        found = {}
        for path in runs_below(self.place):
            try:
                seen = tuple(_seen(path / name) for name in ("config.yaml", "events.jsonl", "metrics.jsonl", LOCK))
                known = self._known.get(path)
                # A process may die without a word, so a run that goes on is looked at each time.
                if known is None or known[0] != seen or known[1].state == RUNNING:
                    known = (seen, line_of(path, self.id_of(path)))
            except OSError:  # it is being removed
                continue
            found[path] = known
        self._known = found
        return sorted((line for _, line in found.values()), key=lambda line: line.started or "", reverse=True)

    def id_of(self, path: Path) -> str:
        return path.relative_to(self.place).as_posix()

    def path_of(self, run: str) -> Path | None:
        """Of a run below the place; None for whatever is none."""
        try:
            path = (self.place / run).resolve()
            is_below = path == self.place or self.place in path.parents
            return path if is_below and (path / "config.yaml").is_file() else None
        except (OSError, ValueError):  # no path at all
            return None


def runs_below(place: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Directories with a config.yaml; a run's own warm start among them."""
    if (place / "config.yaml").is_file():
        yield place
    if depth == 0:
        return
    try:
        below = sorted(entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in below:
        if not name.startswith("."):
            yield from runs_below(place / name, depth - 1)


def line_of(path: Path, run: str = ".") -> RunLine:
    """Raises `OSError`."""
    config = read_config(path)
    events, metrics = (last_lines(path / name, TAIL_BYTES) for name in ("events.jsonl", "metrics.jsonl"))
    first = first_line(path / "events.jsonl", TAIL_BYTES)
    trainer, model = config.get("trainer") or {}, config.get("model") or {}
    started = first.get("time") if first else None
    state, error = state_of(path, events)
    return RunLine(
        id=run,
        name=str(config.get("name") or path.name),
        state=state,
        recipe=_last_part(config.get("recipe")),
        algorithm=(config.get("algorithm") or {}).get("name"),
        model=_last_part(model.get("path")),
        started=started,
        seconds=_seconds(started, events[-1].get("time") if events else None),
        step=int(metrics[-1]["step"]) if metrics and isinstance(metrics[-1].get("step"), int | float) else None,
        max_steps=trainer.get("max_steps"),
        accuracy=newest(metrics, "accuracy/heldout"),
        reward=newest(metrics, "reward/mean"),
        samples_per_s=newest(metrics, "perf/samples_per_s"),
        error=error,
    )


def state_of(path: Path, events: list[dict[str, Any]]) -> tuple[str, str | None]:
    """And what it failed with."""
    last = last_turn(events)
    if state := ENDED.get(str(last.get("kind"))):
        return state, last.get("message") if state == FAILED else None
    if not (path / LOCK).exists():
        return UNFINISHED, None
    return (RUNNING if is_held(path / LOCK) else LOST), None


def is_held(lock: Path) -> bool:
    """Whether somebody works in the directory, as far as the lock's file tells. It is not locked to see: that could
    keep out a run that is just starting. Of a process on another machine, what its file says is believed."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(holder, dict) or "pid" not in holder:
        return False
    return holder.get("host") != socket.gethostname() or Path(f"/proc/{holder['pid']}").exists()


def read_config(path: Path) -> dict[str, Any]:
    """Empty where it cannot be read: of another version, or half of one. Raises `OSError`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        found = yaml.load((path / "config.yaml").read_text(encoding="utf-8", errors="replace"), loader)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def newest(lines: list[dict[str, Any]], key: str) -> float | None:
    return next((float(line[key]) for line in reversed(lines) if isinstance(line.get(key), int | float)), None)


def _seen(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


def _last_part(path: Any) -> str | None:
    return Path(str(path)).name if path else None


def _seconds(start: Any, end: Any) -> float | None:
    try:
        return (datetime.fromisoformat(str(end)) - datetime.fromisoformat(str(start))).total_seconds()
    except ValueError:
        return None


def differing(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What several runs' configurations differ in: by key, each run's value. `name` and places are no difference."""
    flat = {run: dict(_flat(config)) for run, config in configs.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values if key not in ("name", "output_dir"))
    rows = {key: {run: values.get(key) for run, values in flat.items()} for key in keys}
    return {
        key: row for key, row in rows.items() if len({json.dumps(value, default=str) for value in row.values()}) > 1
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
