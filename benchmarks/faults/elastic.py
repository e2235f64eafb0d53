"""Costs for the steps of a run when engines join and leave: one, three, and one again, by `penstock scale`.

The engines are fakes that wait instead of computing, as in `others.py`, so one engine makes steps of some seconds and
three make shorter ones. A step is compared with the median step of as many engines, the fewest that there were in it:
one that is longer was held up by a change.
"""

import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.faults.others import PACED
from benchmarks.faults.runs import Finished, Runs
from benchmarks.harness import ROOT, Target, new_table, show

WORDS = [*PACED, "rollout.num_workers=1", "trainer.max_steps=32", "max_staleness=1"]
SETTLED, GROWS_AT, SHRINKS_AT = 3, 9, 20
"""Steps: not measured before the first, three engines from the second on, one again from the third on."""
MOST = 1.2


class Scaling(threading.Thread):
    """A thread that makes requests at two steps, and waits until they were granted."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._directory, self._environment = directory, environment
        self._stopped = threading.Event()

    def run(self) -> None:
        for step, request in ((GROWS_AT, "rollout=3"), (SHRINKS_AT, "rollout=1")):
            while self._num_steps() < step:
                if self._stopped.wait(0.05):
                    return
            command = [sys.executable, "-m", "penstock.cli.main", "scale", str(self._directory), request]
            subprocess.run(command, cwd=ROOT, env=self._environment, check=True, timeout=120)

    def _num_steps(self) -> int:
        try:
            return (self._directory / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def measure(runs: Runs, quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    rounds = []
    for number in range(num_rounds or (1 if quick else 3)):
        scaling = Scaling(runs.next_directory, runs.environment)
        scaling.start()
        try:
            rounds.append({"round": number, **_measured(runs.run(WORDS))})
        finally:
            scaling.stop()
    return rounds


def _measured(run: Finished) -> dict[str, Any]:
    seconds = {line["step"]: line["timing_s/step"] for line in run.metrics if line["step"]}
    engines = {line["step"]: int(line["rollout/num_engines"]) for line in run.metrics if line["step"]}
    return {**compared(seconds, engines), "steps": list(seconds.values()), "engines": list(engines.values())}


def compared(seconds: dict[int, float], engines: dict[int, int]) -> dict[str, float]:
    """Medians of steps with one engine and with three, and the longest step since the first change, over the median
    with as many engines. `seconds`, `engines`: of each step, the engines at its end."""
    fewest = {step: min(count, engines.get(step - 1, count)) for step, count in engines.items()}
    alone = statistics.median(seconds[step] for step in seconds if SETTLED < step <= GROWS_AT)
    three = statistics.median(seconds[step] for step, count in fewest.items() if count == 3)
    usual = {1: alone, 2: between(alone, three), 3: three}
    longest = max(seconds[step] / usual[fewest[step]] for step in seconds if step > GROWS_AT)
    return {"alone_s": alone, "three_s": three, "longest": longest}


def between(alone: float, three: float) -> float:
    """Estimate the seconds with two engines, of which there are too few steps for a median: the part of a step that
    engines share is half of one engine's, where three have a third of it."""
    shared = (alone - three) * 3 / 2
    return alone - shared / 2


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    columns = ["one engine, median", "three, median", "longest while they join and leave, of as many engines' median"]
    table = new_table("Seconds of a step while engines join and leave", [], columns)
    for entry in rounds:
        table.add_row(f"{entry['alone_s']:.2f}", f"{entry['three_s']:.2f}", f"{entry['longest']:.2f}x")
    show(table)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    longest = statistics.median(entry["longest"] for entry in rounds)
    return [Target("longest step while engines join and leave, of as many engines'", longest, "x", "<=", MOST)]
