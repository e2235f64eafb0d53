"""What it costs the steps of a run that engines join and leave: one, three, and one again, by `penstock scale`.

The engines are fakes that wait instead of computing, as in `others.py`, so one engine makes steps of some seconds and
three make shorter ones. A step that is longer than those of one engine would be held up by who joins or leaves.
"""

import statistics
import subprocess
import sys
import threading
import time
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
    """Wishes at two steps, and when they were granted."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._directory, self._environment = directory, environment
        self._stopped = threading.Event()

    def run(self) -> None:
        for step, wish in ((GROWS_AT, "rollout=3"), (SHRINKS_AT, "rollout=1")):
            while self._num_steps() < step:
                if self._stopped.wait(0.05):
                    return
            command = [sys.executable, "-m", "penstock.orchestrator.cli", "scale", str(self._directory), wish]
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
    """Seconds of steps with one engine, and of the longest afterwards."""
    seconds = {line["step"]: line["timing_s/step"] for line in run.metrics if line["step"]}
    engines = {line["step"]: line["rollout/num_engines"] for line in run.metrics if line["step"]}
    alone = [seconds[step] for step in seconds if SETTLED < step <= GROWS_AT]
    later = {step: value for step, value in seconds.items() if step > GROWS_AT}
    together = [value for step, value in later.items() if engines[step] == 3]
    return {"alone_s": statistics.median(alone), "longest_s": max(later.values()),
            "three_s": statistics.median(together), "at": time.time()}  # fmt: skip


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    columns = ["one engine, median", "three, median", "longest while they join and leave"]
    table = new_table("Seconds of a step while engines join and leave", [], columns)
    for entry in rounds:
        table.add_row(f"{entry['alone_s']:.2f}", f"{entry['three_s']:.2f}", f"{entry['longest_s']:.2f}")
    show(table)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    longest = statistics.median(entry["longest_s"] / entry["alone_s"] for entry in rounds)
    return [Target("longest step while engines join and leave, of one engine's", longest, "x", "<=", MOST)]
