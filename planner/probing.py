"""Plans that are tried for some steps each: `penstock plan --probe N`.

    the best of each class ─▶ penstock run, a few steps ─▶ seconds a step, of its metrics.jsonl ─▶ the fastest is kept
                                      └▶ deadline, exit code ─▶ a failure with a name, and on with the next

Probes are ordinary runs, one after the other, in directories of their own, which stay: `penstock ui` shows them. They
evaluate nothing, leave no checkpoints and no model, and are told to nobody.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from penstock.conf.errors import ConfigError, PenstockError, how_ended
from penstock.conf.run import RunConfig
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.calibration import SETTLED
from penstock.planner.search import Plan

COMMAND = (sys.executable, "-m", "penstock.cli.main", "run")
STEPS = 5
"""Steps that count, after those that fill the pipeline, compile and warm up: plans that differ by less than the mean of
so many varies are equally good."""
START_S, TIMES = 900.0, 10
"""Deadline of a probe where nobody says: seconds for it to start in, and how many times its steps may take what is
predicted."""
GRACE_S = 60.0
"""Seconds for a run to end in order after its deadline; then it is killed."""


class ProbeOverdue(PenstockError):
    """A probe that was not done by its deadline."""


class ProbesFailed(PenstockError):
    """None of the probes has measured anything."""


Run = Callable[[Sequence[str], Path, float], int]
"""Function that makes a run of these words within so many seconds, writes what it prints to a file, and returns its
exit code. Raises `ProbeOverdue`."""


@dataclass(frozen=True)
class Probe:
    """A plan that was tried."""

    plan: Plan
    overrides: tuple[str, ...]
    """The plan's, without what makes a probe of it."""
    step_s: float = 0.0
    """Measured seconds of a step; 0: it failed."""
    failure: str = ""
    """Name of what went wrong, and what was said of it."""


def asked_probes(text: str) -> tuple[int, float | None]:
    """The number of probes and the deadline of each in seconds, of `N` or `N:MINUTES`. Raises `ConfigError`."""
    number, _, minutes = text.partition(":")
    try:
        found = int(number), float(minutes) * 60 if minutes else None
    except ValueError:
        found = 0, None
    if found[0] < 1 or (found[1] is not None and found[1] <= 0):
        raise ConfigError(
            f"--probe {text}: write how many of the best plans are tried, as in --probe 3, or with the minutes that "
            "each may take, as in --probe 3:20."
        )
    return found


def first_steps(config: RunConfig) -> int:
    """Number of steps that do not count: those that fill the pipeline, and at least those that compile."""
    return max(SETTLED, config.max_staleness + 1)


def probe(
    chosen: Sequence[tuple[Plan, Sequence[str]]], place: Path, deadline_s: float | None, run: Run, console: Console
) -> list[Probe]:
    """Try plans one after the other. `chosen`: plans with the words of their runs. Raises `ProbesFailed`."""
    place.mkdir(parents=True, exist_ok=True)
    found = []
    for number, (plan, words) in enumerate(chosen, 1):
        steps = first_steps(plan.config) + STEPS
        limit_s = deadline_s or START_S + TIMES * steps * plan.step_s
        name = f"{number}-{plan.config.placement}-{plan.config.max_staleness}-off"
        own = [
            f"name={name}", f"output_dir={place}", f"trainer.max_steps={steps}", "resume=never", "faults.lease_s=0",
            "evaluation.every_steps=0", "checkpoint.every_steps=0", "tracking.export_model=false", "tracking.sinks=[]",
        ]  # fmt: skip
        console.print(
            f"probe {number} of {len(chosen)}: {steps} steps in {place / name}, within {limit_s / 60:.0f} minutes",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        log = place / f"{name}.log"
        step_s, failure = 0.0, ""
        try:
            code = run([*words, *own], log, limit_s)
            step_s, failure = measured(place / name, first_steps(plan.config)), ""
            if code or not step_s:
                step_s, failure = 0.0, why_failed(place / name, log, code)
        except ProbeOverdue as error:
            failure = told_failure(place / name) or f"{type(error).__name__}: {error}"
        found.append(Probe(plan, tuple(words), step_s, failure))
    if not any(one.step_s for one in found):
        told = "\n".join(f"  {number}: {one.failure}" for number, one in enumerate(found, 1))
        raise ProbesFailed(f"no probe has measured a step; what they printed is in {place}/*.log.\n{told}")
    return found


def best_of(probes: Sequence[Probe]) -> Probe:
    """The fastest of those that came to their end."""
    return min((one for one in probes if one.step_s), key=lambda one: one.step_s)


def in_process(words: Sequence[str], log: Path, deadline_s: float, command: Sequence[str] = COMMAND) -> int:
    """Run in a process of its own. Raises `ProbeOverdue`."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise ProbeOverdue(
            f"not done after {deadline_s / 60:.1f} minutes; --probe N:MINUTES gives each more. It printed {log}"
        ) from None
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a run that goes on: in order, and else by force."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measured(place: Path, first: int) -> float:
    """Mean seconds of a run's steps after so many first ones: steps off each other take turns in being long. 0 where
    there are none."""
    try:
        lines = RunDirectory.open(place).read_metrics()
    except (OSError, PenstockError):
        return 0.0
    seconds = [line["timing_s/step"] for line in lines if line.get("step", 0) > first and "timing_s/step" in line]
    return fmean(seconds) if len(seconds) >= STEPS else 0.0


def told_failure(place: Path) -> str:
    """The name of a run's failure, by its events, with the first line of what was said; empty where none is told."""
    try:
        events = [event for event in RunDirectory.open(place).read_events() if event["kind"] == "failed"]
    except (OSError, PenstockError):
        return ""
    return f"{events[-1].get('error')}: {events[-1].get('message')}".partition("\n")[0] if events else ""


def why_failed(place: Path, log: Path, code: int) -> str:
    """The name of a run's failure: of its events, else how it ended, with the last line that it printed."""
    if told := told_failure(place):
        return told
    how = how_ended(code)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last}" if last and code else f"{how}, fewer than {STEPS} steps that count"


def table_of_probes(probes: Sequence[Probe], described: Callable[[Plan], str]) -> Table:
    """Predicted beside measured seconds of a step."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("probe")
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in probes:
        ends = (f"{one.step_s:.1f}", f"{one.step_s / one.plan.step_s:.2f}") if one.step_s else ("failed", "")
        table.add_row(described(one.plan), f"{one.plan.step_s:.1f}", *ends)
    return table
