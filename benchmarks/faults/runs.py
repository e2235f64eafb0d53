"""Runs of `penstock run` on a cluster of this machine, and when each of their steps was logged."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from tests.chaos.bed import OneMachine
from tests.chaos.disturbance import Disturbed, Done
from tests.chaos.plan import Fault

LOOK_S = 0.02
NUM_CPUS = 8
"""Number of CPUs that are counted, not there: more actors than cores."""


@dataclass
class Finished:
    """A run that has ended."""

    directory: Path
    done: list[Done]
    """Faults of the run."""
    ended_at: float
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Times at which the last step in the log changed, and that step."""

    def next_step_after(self, at: float) -> float:
        """Seconds from a moment to the first step in the log that was not there then."""
        before = max((step for when, step in self.steps if when <= at), default=0)
        return next(when for when, step in self.steps if when > at and step > before) - at

    @property
    def events(self) -> list[dict[str, Any]]:
        return lines_of(self.directory / "events.jsonl")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return lines_of(self.directory / "metrics.jsonl")


class Runs:
    """Runs on one cluster. Lifecycle: `on_a_cluster`, then any number of runs, one at a time."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.environment, self.address = environment, environment["RAY_ADDRESS"]
        self._folder, self._number = folder, 1
        self._bed = OneMachine(environment)

    @classmethod
    @contextmanager
    def on_a_cluster(cls, folder: Path) -> "Iterator[Runs]":
        os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        head = {"num_cpus": NUM_CPUS, "include_dashboard": False, "object_store_memory": 200 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield cls(folder, {**os.environ, "RAY_ADDRESS": cluster.address})
        finally:
            cluster.shutdown()

    @property
    def next_directory(self) -> Path:
        return self._folder / f"run-{self._number}"

    def run(self, words: Sequence[str], faults: Sequence[Fault] = (), retries: int = 0) -> Finished:
        run = Disturbed(self._bed, [sys.executable], words, self.next_directory, retries)
        self._number += 1
        clock = StepClock(run.directory / "metrics.jsonl")
        clock.start()
        try:
            done = run.go(faults)
        finally:
            clock.stop()
        return Finished(run.directory, done, time.time(), clock.steps)


class StepClock(threading.Thread):
    """A thread that looks at the log of a run all the time."""

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self.steps: list[tuple[float, int]] = []
        self._file, self._stopped = file, threading.Event()

    def run(self) -> None:
        size = -1
        while not self._stopped.wait(LOOK_S):
            try:
                now_size = self._file.stat().st_size
            except FileNotFoundError:
                continue
            if now_size != size:
                size, lines = now_size, lines_of(self._file)
                last = lines[-1]["step"] if lines else 0
                if not self.steps or last != self.steps[-1][1]:
                    self.steps.append((time.time(), last))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Whole lines of a file."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
