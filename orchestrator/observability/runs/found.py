"""Finds the runs below a directory, each in one line: as much as the beginning and the end of its files tell.

Nothing is read twice that has not changed, so a look at hundreds of runs costs a look at their files' times.
"""

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.runs.own_files import (
    TAIL_BYTES,
    first_line,
    is_number,
    is_own,
    last_lines,
    read_config,
    read_events,
    read_json,
    read_own,
    section,
)
from penstock.orchestrator.run_directory.run_directory import RUN_ID
from penstock.orchestrator.run_directory.run_lock import FILE as LOCK
from penstock.orchestrator.run_directory.run_lock import last_start_or_end

_LOG = logging.getLogger("penstock")
DEPTH = 3
"""Levels of directories below a place in which runs are looked for."""
MAX_RUNS = 2000
"""Most runs of one place; of more, those that were made or changed last."""
MAX_CHARACTERS = 2000
"""Most characters of a text of a run's files, in its line."""
LOCK_BYTES = 1 << 12
MOST_ID_BYTES = 1 << 8
MOST_PID = 1 << 31
FINISHED, RUNNING, FAILED, INTERRUPTED, LOST = "finished", "running", "failed", "interrupted", "lost"
UNFINISHED, UNREADABLE = "unfinished", "unreadable"
ENDED = {"end": FINISHED, "failed": FAILED, "interrupted": INTERRUPTED}
"""States of a run that is over, by the event with which a process has left it."""
SERVING = "serving.json"
"""File in which a server says what it is doing."""
PLACED = "placed"
"""The event that says what a run's actors have reserved."""


@dataclass(frozen=True)
class RunLine:
    """A run, for the table of runs. None: not known (yet)."""

    id: str
    """The run's path below the place that was given; "." for the place itself."""
    name: str
    state: str
    """The state: running, finished, failed, interrupted; lost: its process is gone and left no event; unfinished: of a
    copy, where nothing tells whether a process works in it; unreadable: its files may not be read, `error` says why."""
    run_id: str | None = None
    """The id beside the name, in metrics and messages."""
    recipe: str | None = None
    algorithm: str | None = None
    model: str | None = None
    started: str | None = None
    """Time of the start, UTC, ISO 8601."""
    seconds: float | None = None
    """Seconds from the run's first event to its last."""
    step: int | None = None
    max_steps: int | None = None
    accuracy: float | None = None
    reward: float | None = None
    loss: float | None = None
    """The loss of a run that has no reward."""
    samples_per_s: float | None = None
    cost: float | None = None
    cost_unit: str | None = None
    """Unit of the cost: GPU h, or CPU h."""
    error: str | None = None
    """The error that the run failed with, or the reason why it cannot be read."""
    is_server: bool = False
    """True if it serves other people's loops (`penstock serve`)."""


class Runs:
    """Runs below one place, `MAX_RUNS` at most. Lifecycle: `lines` at any time."""

    def __init__(self, place: Path) -> None:
        self.place = place.expanduser().resolve()
        self._known: dict[Path, tuple[tuple[Any, ...], RunLine]] = {}

    def lines(self) -> list[RunLine]:
        """Lines of the runs, the newest first."""
        found = {}
        for path in newest_of(runs_below(self.place), MAX_RUNS):
            known = self._known.get(path)
            try:
                seen = tuple(_seen(path / name) for name in ("config.yaml", "events.jsonl", "metrics.jsonl", LOCK))
                # A process may die and leave no event, so a run that goes on is looked at each time.
                if known is None or known[0] != seen or known[1].state in (RUNNING, UNREADABLE):
                    known = (seen, any_line_of(path, self.id_of(path)))
            except FileNotFoundError:  # it is being removed
                continue
            except OSError as error:
                known = ((), _unreadable(path, self.id_of(path), error))
            found[path] = known
        self._known = found
        return sorted((line for _, line in found.values()), key=lambda line: line.started or "", reverse=True)

    def id_of(self, path: Path) -> str:
        return path.relative_to(self.place).as_posix()

    def path_of(self, run: str) -> Path | None:
        """The path of a run below the place; None for what is no run."""
        try:
            path = (self.place / run).resolve()
            is_below = path == self.place or self.place in path.parents
            return path if is_below and is_own(path, "config.yaml") else None
        except (OSError, ValueError, RuntimeError):  # no path at all; RuntimeError: a link to itself
            return None


def runs_below(place: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Directories with a config.yaml. Below a run only its own warm start is looked for: its samples may be many
    files."""
    is_run = has_config(place)
    if is_run:
        yield place
    if depth == 0:
        return
    try:
        below = sorted(entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in below:
        if not name.startswith(".") and (not is_run or has_config(place / name)):
            yield from runs_below(place / name, depth - 1)


def has_config(path: Path) -> bool:
    """Return whether the directory is a run's; one that may not be read is none."""
    try:
        return is_own(path, "config.yaml")
    except OSError:
        return False


def newest_of(paths: Iterable[Path], most: int) -> list[Path]:
    """The directories, of many, in which something was made or removed last."""
    found = list(paths)
    return found if len(found) <= most else sorted(found, key=_changed_at)[-most:]


def any_line_of(path: Path, run: str) -> RunLine:
    """The line of a run, also of one that cannot be read: no run keeps the others from being seen. Raises
    `FileNotFoundError`."""
    try:
        return line_of(path, run)
    except FileNotFoundError:
        raise
    except OSError as error:
        return _unreadable(path, run, error)
    except Exception as error:  # noqa: BLE001 - whatever other code makes of files that others wrote
        _LOG.warning("%s: its files are no run's: %s: %s", path, type(error).__name__, error)
        return _unreadable(path, run, error)


def _unreadable(path: Path, run: str, error: Exception) -> RunLine:
    text = str(error) if isinstance(error, OSError) else f"Its files are no run's: {type(error).__name__}: {error}"
    return RunLine(run, path.name, UNREADABLE, error=_text(text))


def line_of(path: Path, run: str = ".") -> RunLine:
    """The line of a run. Raises `OSError`."""
    config = read_config(path)
    events, metrics = read_events(path), last_lines(path, "metrics.jsonl", TAIL_BYTES)
    first = first_line(path, "events.jsonl", TAIL_BYTES) or {}
    state, error = state_of(path, events)
    steps = [line["step"] for line in metrics if is_number(line.get("step"))]  # an evaluation's line comes late
    step, max_steps = max(steps, default=None), newest([section(config, "trainer")], "max_steps")
    seconds = _seconds(first.get("time"), events[-1].get("time") if events else None)
    cost, unit = cost_of(events, seconds) or (None, None)
    return RunLine(
        id=run,
        name=_text(config.get("name")) or path.name,
        state=state,
        run_id=_id_of(path),
        recipe=_last_part(config.get("recipe")),
        algorithm=_text(section(config, "algorithm").get("name")),
        model=_last_part(section(config, "model").get("path")),
        started=_text(first.get("time")),
        seconds=seconds,
        step=None if step is None else int(step),
        max_steps=None if max_steps is None else int(max_steps),
        accuracy=newest(metrics, "accuracy/heldout"),
        reward=(reward := newest(metrics, "reward/mean")),
        loss=newest(metrics, "actor/loss") if reward is None else None,
        samples_per_s=newest(metrics, "perf/samples_per_s"),
        cost=cost,
        cost_unit=unit,
        error=error,
        is_server=is_own(path, SERVING),
    )


def _id_of(path: Path) -> str | None:
    """The id of a run; None: it has none yet. Raises `OSError`."""
    try:
        return read_own(path, RUN_ID, MOST_ID_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def state_of(path: Path, events: list[dict[str, Any]]) -> tuple[str, str | None]:
    """The state of a run, and the error that it failed with."""
    last = last_start_or_end(events)
    if state := ENDED.get(str(last.get("kind"))):
        return state, _text(last.get("message")) if state == FAILED else None
    if not is_own(path, LOCK):
        return UNFINISHED, None
    return (RUNNING if is_held(path) else LOST), None


def is_held(path: Path) -> bool:
    """Return whether a process works in the directory, as far as the lock's file tells. It is not locked to see: that
    could keep out a run that is just starting. What the file says of a process on another machine is believed."""
    try:
        holder = read_json(path, LOCK, LOCK_BYTES)
    except OSError:
        return False
    if not isinstance(holder, dict) or not isinstance(pid := holder.get("pid"), int):
        return False
    return holder.get("host") != socket.gethostname() or (0 < pid < MOST_PID and Path(f"/proc/{pid:d}").exists())


def cost_of(events: Sequence[Mapping[str, Any]], seconds: float | None) -> tuple[float, str] | None:
    """Hours and their unit. Members that joined or left later are not counted. None: the run has not started its
    actors, or comes from a version that did not say.

    >>> cost_of([{"kind": "placed", "cpus": 6.0, "gpus": 4.0}], 1800.0)
    (2.0, 'GPU h')
    """
    placed = next((event for event in reversed(events) if event.get("kind") == PLACED), None)
    if placed is None or seconds is None:
        return None
    for key, unit in (("gpus", "GPU h"), ("cpus", "CPU h")):
        count = placed.get(key)
        if isinstance(count, int | float) and count > 0:
            return count * seconds / 3600, unit
    return None


def newest(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The last value of a metric that is a finite number."""
    return next((float(line[key]) for line in reversed(lines) if is_number(line.get(key))), None)


def _seen(file: Path) -> tuple[int, int] | None:
    try:
        status = file.lstat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


def _changed_at(path: Path) -> int:
    seen = _seen(path)
    return seen[0] if seen else 0


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:MAX_CHARACTERS]


def _last_part(path: Any) -> str | None:
    return Path(str(path)[-MAX_CHARACTERS:]).name if path else None


def _seconds(start: Any, end: Any) -> float | None:
    try:
        return (datetime.fromisoformat(str(end)) - datetime.fromisoformat(str(start))).total_seconds()
    except (ValueError, TypeError):  # TypeError: one of them without a time zone
        return None
