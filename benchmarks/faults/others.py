"""Cost of an engine's death for the other engines: tokens that they sample a second from then on, while another is
started in its place, beside those of the seconds before.

The engines are fakes that wait instead of computing, since a new process takes processor time, which engines with
devices of their own do not miss. Everything else is real: actors, store, trainer, publications.
"""

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.faults.runs import Finished, Runs
from benchmarks.harness import Target, new_table, show
from tests.chaos.checker import answers_of
from tests.chaos.plan import KILL, Fault
from tests.chaos.plan import Target as Victim

NUM_ROUNDS = 3
NUM_ENGINES = 4
VICTIM = "Rollout-0"
PACED = [
    "recipe=arithmetic", "warm_start.recipe=null", "rollout.engine=scripted", "rollout.scripted.latency_s=0.1",
    "rollout.scripted.tokens_per_s=2", "rollout.max_concurrent_samples=32", "trainer.groups_per_step=8",
    "evaluation.every_steps=0", "tracking.export_model=false",
]  # fmt: skip
"""Settings whose groups take three seconds, so engines and not the trainer set the pace."""
WORDS = [*PACED, f"rollout.num_workers={NUM_ENGINES}", "trainer.max_steps=16", "max_staleness=2"]
KILLED_AFTER = 6
SPAN_S = 12.0
"""Seconds before and after the death: some groups long, as an engine's tokens are counted a group at a time."""
LOOK_S = 0.25
SHARE = 0.95


class Tokens(threading.Thread):
    """A thread that asks the other engines all the time how many tokens they have sampled."""

    def __init__(self, directory: Path, address: str) -> None:
        super().__init__(daemon=True)
        self._file, self._address = directory / "cluster.json", address
        self._stopped = threading.Event()
        self.seen: list[tuple[float, int]] = []

    def run(self) -> None:
        while not self._file.exists():
            if self._stopped.wait(LOOK_S):
                return
        namespace = json.loads(self._file.read_text())["namespace"]
        ray.init(self._address, log_to_driver=False, logging_level="ERROR")
        try:
            names = [f"Rollout-{number}" for number in range(1, NUM_ENGINES)]
            engines = [self._found(name, namespace) for name in names]
            while not self._stopped.wait(LOOK_S):
                progress = ray.get([engine.progress.remote() for engine in engines], timeout=30)
                self.seen.append((time.time(), sum(one.num_done for one in progress)))
        except (ray.exceptions.RayError, ValueError):
            pass  # the run has ended
        finally:
            ray.shutdown()

    def _found(self, name: str, namespace: str) -> Any:
        while True:
            try:
                return ray.get_actor(name, namespace=namespace)
            except ValueError:
                if self._stopped.wait(LOOK_S):
                    raise

    def rate(self, begin: float, end: float) -> float:
        """Rate between two moments, in tokens a second."""
        within = [(at, count) for at, count in self.seen if begin <= at <= end]
        (first, before), (last, after) = within[0], within[-1]
        return (after - before) / (last - first)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def measure(runs: Runs, quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    return [_measured(number, runs) for number in range(num_rounds or (1 if quick else NUM_ROUNDS))]


def _measured(number: int, runs: Runs) -> dict[str, Any]:
    tokens = Tokens(runs.next_directory, runs.address)
    tokens.start()
    try:
        run: Finished = runs.run(WORDS, [Fault(Victim(VICTIM, KILL), KILLED_AFTER, 0.5)])
    finally:
        tokens.stop()
    (answer,) = answers_of(run.directory, run.done)
    at, again = answer.done.at, answer.done.at + (answer.noticed_after_s or 0.0) + answer.seconds
    before, after = tokens.rate(at - SPAN_S, at), tokens.rate(at, max(again, at + SPAN_S))
    return {"round": number, "before": before, "after": after, "away_s": again - at}


def show_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table(
        f"{NUM_ENGINES - 1} engines before and after the death of another one, tokens/s",
        [],
        ["before", "after", "it was away for s"],
    )
    for entry in rounds:
        table.add_row(f"{entry['before']:.0f}", f"{entry['after']:.0f}", f"{entry['away_s']:.1f}")
    show(table)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    share = statistics.median(entry["after"] / entry["before"] for entry in rounds)
    return [Target("throughput of the engines that are left", share, "x", ">=", SHARE)]
