"""A sweep: one run for each combination of the values that keys have, as many side by side as there is room for.

    seed=1,2,3        seed=range(1,4)        trainer.optimizer.lr=1e-4,3e-4        algorithm=choice(grpo,rloo)

Each is a `penstock run` in a process of its own, with `resume=auto`: the same sweep again continues where it was, and
does not repeat finished runs. A run that fails does not end the others.
"""

import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console
from rich.table import Table

from penstock.conf.errors import ConfigError, how_ended
from penstock.conf.secret import hide_word
from penstock.orchestrator.cluster.placement.actors import needed
from penstock.orchestrator.cluster.ray_cluster import count_local_gpus, join
from penstock.orchestrator.cluster.ray_connection import cluster_address
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.configuration.values import split
from penstock.orchestrator.observability.runs.found import FINISHED, RunLine, line_of
from penstock.orchestrator.signals import Repeats, ending
from penstock.workers.runtime.local_files import write_whole

MOST = 10_000
"""Most runs of one sweep."""
OWN = ("name", "output_dir", "resume")
"""Keys that the sweep sets for each of its runs."""
SEED = "seed"


@dataclass(frozen=True)
class Point:
    name: str
    """Name of the point's run, made of the values that differ between points: lr-1e-4_seed-1."""
    values: dict[str, str]
    """Values of the keys that are swept, by key."""
    words: tuple[str, ...]
    """All words that `penstock run` is given."""

    @property
    def setting(self) -> tuple[tuple[str, str], ...]:
        """The point's values without the seed: points of one setting differ by chance alone."""
        return tuple((key, value) for key, value in self.values.items() if key != SEED)


def points_of(words: Sequence[str]) -> list[Point]:
    """The points of a sweep: every combination, the last word's values changing fastest. Raises `ConfigError`."""
    parser = OverridesParser.create()
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for word in words:
        values = _values(parser, word)
        key = word.partition("=")[0].strip().lstrip("+")
        if key in OWN:
            raise ConfigError(f"{word}: a sweep sets {key} of its runs itself. Its own directory is --directory DIR.")
        if values is None:
            fixed.append(word)
        elif len(set(values)) < len(values):
            raise ConfigError(f"{word}: a value is there twice.")
        else:
            swept[word.partition("=")[0].strip()] = values
    if not swept:
        raise ConfigError(
            "nothing is swept: give a key several values, like seed=1,2,3 or trainer.max_steps=range(10,40,10)."
        )
    count = math.prod(map(len, swept.values()))
    if count > MOST:
        raise ConfigError(f"the sweep has {count:,} runs; {MOST:,} are the most.")
    shown = _short([key.lstrip("+") for key in swept])
    points = []
    for chosen in itertools.product(*swept.values()):
        own = dict(zip(swept, chosen, strict=True))
        name = "_".join(f"{shown[key.lstrip('+')]}-{_as_file_name(value)}" for key, value in own.items())
        told = tuple(f"{key}={value}" for key, value in own.items())
        points.append(Point(name, {key.lstrip("+"): value for key, value in own.items()}, (*fixed, *told)))
    names = [point.name for point in points]
    if len(set(names)) < len(names):
        points = [Point(f"{number}_{point.name}", point.values, point.words) for number, point in enumerate(points, 1)]
    return points


def _values(parser: OverridesParser, word: str) -> list[str] | None:
    """The values of a word; None for a word of one value. Raises `ConfigError`."""
    try:
        parsed = parser.parse_override(word)
        if not parsed.is_sweep_override():
            return None
        text = word.partition("=")[2]
        listed = re.fullmatch(r"\s*choice\((.*)\)\s*", text)
        written, values = split(listed[1] if listed else text), list(parsed.sweep_string_iterator())
        return written if len(written) == len(values) else values  # a commit 2e90114 is no number, and stays a text
    except HydraException as error:
        if re.search(r"=\s*(interval|glob)\(", word):
            raise ConfigError(f"{word}: {str(error).splitlines()[0]}. List the values, or use range(…).") from None
        return None  # text that is no literal, which `penstock run` takes as it is


def _short(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or as many parts as make it unique."""
    every = list(keys)
    found = {}
    for key in every:
        parts = key.split(".")
        found[key] = next(
            short for count in range(1, len(parts) + 1)
            if (short := ".".join(parts[-count:])) == key
            or sum(other == short or other.endswith(f".{short}") for other in every) == 1
        )  # fmt: skip
    return found


def _as_file_name(value: str) -> str:
    """The value as part of a directory's name."""
    return re.sub(r"[^\w.+-]+", "-", value).strip("-.")[-40:] or "empty"


FILE = "sweep.json"
"""Name of the file in the sweep's directory with its words and its runs, for the page."""
COMMAND = (sys.executable, "-m", "penstock.cli.main", "run")
LOOK_S = 0.2
GRACE_S = 60.0
"""Seconds for runs to end after Ctrl-C; then they are killed."""
INTERRUPTED = 130


class Sweep:
    """Lifecycle: made, `run` once."""

    def __init__(
        self, points: Sequence[Point], directory: Path, jobs: int, console: Console, command: Sequence[str] = COMMAND
    ) -> None:
        """`jobs`: number of runs side by side. `command`: the one that a run's words are given to."""
        self._points, self._directory, self._jobs = points, directory.expanduser().resolve(), jobs
        self._console, self._command = console, command
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._codes: dict[str, int] = {}
        self._stops = False
        self._repeats = Repeats()

    def run(self) -> int:
        """Run the sweep. Returns the exit code: 1 if a run failed, 130 after Ctrl-C. Raises `ConfigError`."""
        self._claim()
        waiting = deque(point for point in self._points if not self._is_done(point))
        done = len(self._points) - len(waiting)
        self._console.print(
            f"{len(self._points)} runs below {self._directory}, {self._jobs} side by side"
            + (f"; {done} are finished already" if done else ""),
            highlight=False,
        )
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, *ending())}
        try:
            while (waiting and not self._stops) or self._running:
                while waiting and len(self._running) < self._jobs and not self._stops:
                    self._start(waiting.popleft())
                self._poll()
                time.sleep(LOOK_S)
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        self._console.print(self.table())
        if self._stops:
            return INTERRUPTED
        return 1 if any(self._codes.values()) else 0

    def table(self) -> Table:
        """A table of the results, by setting: mean over its seeds, and the least and the largest."""
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        settings: dict[tuple[tuple[str, str], ...], list[RunLine | None]] = {}
        for point in self._points:
            settings.setdefault(point.setting, []).append(self._line(point))
        keys = [key for key, _ in next(iter(settings))]
        for title in (*keys, "runs", "accuracy", "reward", "loss", "samples/s"):
            table.add_column(title)
        for setting, lines in settings.items():
            done = [line for line in lines if line is not None and line.state == FINISHED]
            cells = [spread([getattr(line, name) for line in done], say) for name, say in SHOWN.items()]
            table.add_row(*(value for _, value in setting), f"{len(done)} of {len(lines)}", *cells)
        return table

    def _claim(self) -> None:
        """Make the directory this sweep's. Raises `ConfigError`."""
        file, said = self._directory / FILE, self._as_json()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            known = json.loads(file.read_text()) if file.is_file() else said
            if known != said:
                raise ConfigError(
                    f"{self._directory}: another sweep is there, with other runs ({FILE}). Choose another --directory, "
                    "or repeat its words to go on with it."
                )
            write_whole(file, json.dumps(said, indent=1))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._directory}: {error}.") from None

    def _as_json(self) -> Any:
        shown = {one.name: {"values": one.values, "words": list(map(hide_word, one.words))} for one in self._points}
        return {"runs": shown}

    def _start(self, point: Point) -> None:
        group = f"tracking.group={self._directory.name}"  # first: the user's own word wins
        words = [group, *point.words, f"name={point.name}", f"output_dir={self._directory}", "resume=auto"]
        with (self._directory / f"{point.name}.log").open("ab") as log:
            self._running[point.name] = subprocess.Popen(
                [*self._command, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._console.print(f"[bold]{point.name}[/] begins", highlight=False)

    def _poll(self) -> None:
        for point in self._points:
            process = self._running.get(point.name)
            if process is None or process.poll() is None:
                continue
            del self._running[point.name]
            self._codes[point.name] = process.returncode
            line = self._line(point)
            if process.returncode == 0 and line is not None:
                said = (
                    f"accuracy {SHOWN['accuracy'](line.accuracy)}" if line.accuracy is not None else f"step {line.step}"
                )
                self._console.print(f"[bold]{point.name}[/] is finished: {said}", highlight=False)
            else:
                how, log = how_ended(process.returncode), f"{self._directory}/{point.name}.log"
                self._console.print(f"[red]{point.name}[/] has ended ({how}): {log}", highlight=False)

    def _stop(self, number: int, _: FrameType | None) -> None:
        """Pass the signal on to the runs, which then end in order; kill them at a second one."""
        if self._repeats():
            return
        how = signal.SIGKILL if self._stops else number
        self._stops = True
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(how)

    def _end_all(self) -> None:
        give_up = time.monotonic() + GRACE_S
        for process in self._running.values():
            try:
                process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _is_done(self, point: Point) -> bool:
        line = self._line(point)
        return line is not None and line.state == FINISHED

    def _line(self, point: Point) -> RunLine | None:
        path = self._directory / point.name
        try:
            return line_of(path, point.name) if (path / "config.yaml").is_file() else None
        except OSError:
            return None


def jobs_for(points: Sequence[Point], plan: Callable[[Sequence[str]], Sequence[str]] = list) -> int:
    """Number of runs side by side, by the run that reserves most. Every point's words are read, so that a wrong one
    ends the sweep before its first run. `plan`: adds the words of a run's plan. Raises `ConfigError`,
    `ResourceError`."""
    needs = []
    for point in points:
        config = load_config(plan([*point.words, f"name={point.name}"]))
        needs.append(needed(resolve(config).plan))
    cpus, gpus = max(cpus for cpus, _ in needs), max(gpus for _, gpus in needs)
    return room_for(cpus, gpus, *_room())


def room_for(cpus: float, gpus: float, have_cpus: float, have_gpus: float) -> int:
    """Number of runs side by side that need so much each; at least one.

    >>> room_for(3, 0, 8, 0), room_for(3, 1, 64, 2), room_for(3, 0, 2, 0)
    (2, 2, 1)
    """
    by = [have / need for have, need in ((have_cpus, cpus), (have_gpus, gpus)) if need]
    return max(1, math.floor(min(by))) if by else max(1, os.cpu_count() or 1)


def _room() -> tuple[float, float]:
    """Numbers of CPUs and GPUs of the machine or the cluster."""
    if (address := cluster_address()) is not None:
        import ray

        join(address, log_to_driver=False)
        try:
            found = ray.cluster_resources()  # type: ignore[no-untyped-call]
        finally:
            ray.shutdown()
        return found.get("CPU", 0.0), found.get("GPU", 0.0)
    return float(len(os.sched_getaffinity(0))), float(count_local_gpus())


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


SHOWN: Mapping[str, Callable[[float | None], str]] = {
    "accuracy": _percent, "reward": _number, "loss": _number, "samples_per_s": _number,
}  # fmt: skip


def spread(values: Sequence[float | None], say: Callable[[float | None], str] = _number) -> str:
    """The mean of values, and least to largest, as text.

    >>> spread([1.0, 2.0, 3.0]), spread([2.0]), spread([None])
    ('2 (1 to 3)', '2', '–')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = say(statistics.fmean(known))
    return mean if len(known) == 1 else f"{mean} ({say(min(known))} to {say(max(known))})"
