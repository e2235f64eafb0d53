"""Predicted against measured: twelve splits of this machine's cores, from one run of ten steps.

The pilot has one engine and one rank of a thread each, one after the other. From its records alone each of the twelve
is predicted; then each is run twice, all of them once before any of them again, in a shuffled order. The twelve and the
bars were written down before anything was measured; the model was developed on other splits.

Beside the seconds of the wall stands what the machine did meanwhile: busy shares of its cores, and of these what other
work had (processes with a nice value) and what the hypervisor took.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import psutil

from benchmarks.harness import ROOT, Target, new_table, settle, show, spread
from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner.calibration import read_pilot
from penstock.planner.simulation.machine import CpuMachine
from penstock.workers.fresh_model import build_fresh_model

NUM_PROMPTS, GROUPS, SIZE, MAX_TOKENS = 512, 6, 12, 64
STEPS, FIRST = 12, 3
"""Steps of a run, and those before the first that counts."""
PILOT_STEPS, RUNS, LONGEST_S = 10, 2, 600.0
LARGEST_ERROR, LEAST_TAU, LARGEST_LOSS = 0.10, 0.8, 0.05


class Way(NamedTuple):
    """A split: numbers of engines and ranks, each with the threads of one, and how far apart they are."""

    engines: int
    engine_threads: int
    ranks: int
    rank_threads: int
    max_staleness: int
    placement: str = "disaggregated"

    def __str__(self) -> str:
        way = "in turns" if self.placement == "colocated" else f"{self.max_staleness} off"
        return f"{self.engines} x {self.engine_threads} + {self.ranks} x {self.rank_threads}, {way}"

    @property
    def words(self) -> list[str]:
        return [
            f"rollout.num_workers={self.engines}", f"rollout.num_threads={self.engine_threads}",
            f"trainer.num_ranks={self.ranks}", f"trainer.num_threads={self.rank_threads}",
            f"max_staleness={self.max_staleness}", f"placement={self.placement}",
        ]  # fmt: skip


PILOT = Way(1, 1, 1, 1, 0)
WAYS = (
    Way(2, 1, 1, 1, 0), Way(1, 2, 1, 2, 0), Way(2, 1, 1, 2, 0), Way(2, 1, 2, 1, 0), Way(3, 1, 2, 1, 0),
    Way(2, 1, 2, 1, 0, "colocated"), Way(1, 1, 1, 2, 0, "colocated"), Way(1, 1, 1, 1, 1), Way(2, 1, 1, 1, 1),
    Way(1, 1, 2, 1, 1), Way(2, 1, 1, 2, 2), Way(3, 1, 1, 1, 2),
)  # fmt: skip


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    """Predict and run each way so many times (default: twice)."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        return compared(Path(folder), WAYS[::6] if quick else WAYS, 1 if quick else num_rounds or RUNS)


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    measured, predicted = _measured(rounds), {one["way"]: one["predicted_s"] for one in rounds}
    means = {way: mean(seconds) for way, seconds in measured.items()}
    errors = [abs(predicted[way] / seconds - 1) for way, seconds in means.items()]
    chosen = min(predicted, key=lambda way: predicted[way])
    return [
        Target(f"{len(means)} ways: mean error of a step", 100 * mean(errors), "%", "<=", 100 * LARGEST_ERROR),
        Target("Kendall's tau, pairs beyond their spread", tau(measured, predicted), "", ">=", LEAST_TAU),
        Target(
            "loss of the chosen way", 100 * (means[chosen] / min(means.values()) - 1), "%", "<=", 100 * LARGEST_LOSS
        ),
    ]


def show_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table(
        "seconds a step; engines x threads + ranks x threads", ["way"],
        ["predicted", "measured (runs)", "error", "others' cores", "load"],
    )  # fmt: skip
    for way, seconds in sorted(_measured(rounds).items(), key=lambda one: mean(one[1])):
        own = [one for one in rounds if one["way"] == way]
        predicted = own[0]["predicted_s"]
        table.add_row(
            way, f"{predicted:.2f}", spread(seconds, 2), f"{predicted / mean(seconds) - 1:+.1%}",
            spread([one["others"] for one in own], 2), spread([one["load"] for one in own], 1),
        )  # fmt: skip
    show(table)


def tau(measured: Mapping[str, Sequence[float]], predicted: Mapping[str, float]) -> float:
    """Kendall's tau over the pairs whose means differ by more than the runs of either do."""
    ranges = {way: max(seconds) - min(seconds) for way, seconds in measured.items()}
    means = {way: mean(seconds) for way, seconds in measured.items()}
    signs = [
        1 if (means[one] - means[other]) * (predicted[one] - predicted[other]) > 0 else -1
        for one, other in combinations(means, 2)
        if abs(means[one] - means[other]) > max(ranges[one], ranges[other])
    ]
    return mean(signs) if signs else 0.0


def compared(folder: Path, ways: Sequence[Way], runs: int) -> list[dict[str, Any]]:
    """Predict these ways from a pilot, and run them."""
    build_fresh_model(folder / "model", FreshModelConfig(), seed=0)
    lines = [json.dumps({"prompt": f"Calculate {17 + 3 * i % 80} + {11 + 7 * i % 80}."}) for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    pilot = ran(folder, PILOT, PILOT_STEPS, "pilot", ["tracking.samples_every_steps=1"])
    machine = CpuMachine.here(read_pilot(pilot["place"]), load_config(_words(folder, PILOT)))
    found = [
        {**ran(folder, way, STEPS, f"{WAYS.index(way) if way in WAYS else str(way)}-{number}"), "way": str(way)}
        for number in range(runs)
        for way in random.Random(number).sample(ways, len(ways))
    ]
    predicted = {str(way): machine.simulate_split(load_config(_words(folder, way))).step_s for way in ways}
    return [{**one, "predicted_s": predicted[one["way"]]} for one in found]


def ran(folder: Path, way: Way, steps: int, name: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """Run a way in a process of its own, on a Ray cluster of its own."""
    settle()
    own = [*_words(folder, way), f"trainer.max_steps={steps}", f"name={name}", *words]
    before, load = psutil.cpu_times(), os.getloadavg()[0]
    with (folder / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", "penstock.cli.main", "run", *own]
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=LONGEST_S, check=True)
    after, place = psutil.cpu_times(), folder / "runs" / name
    wall_s = sum(after) - sum(before)
    metrics = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["timing_s/step"] for line in metrics if line["step"] > FIRST]
    cores = len(os.sched_getaffinity(0))
    return {
        "place": str(place), "step_s": mean(seconds), "steps_s": seconds, "load": load,
        "busy": cores * (1 - (after.idle - before.idle) / wall_s),
        "others": cores * (after.nice - before.nice) / wall_s,
        "stolen": cores * (after.steal - before.steal) / wall_s,
    }  # fmt: skip


def _measured(rounds: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in rounds:
        found.setdefault(one["way"], []).append(one["step_s"])
    return found


def _words(folder: Path, way: Way) -> list[str]:
    return [
        f"model.path={folder / 'model'}", "data.source=jsonl", f"data.path={folder / 'prompts.jsonl'}",
        "data.columns.prompt=prompt", "data.columns.answer=null", "data.chat_template=false",
        "reward.function=digits", "trainer.optimizer.lr=1e-8", f"trainer.groups_per_step={GROUPS}",
        f"algorithm.group_size={SIZE}", f"rollout.sampling.max_tokens={MAX_TOKENS}", "rollout.engine=hf",
        f"rollout.max_concurrent_samples={SIZE}", f"output_dir={folder / 'runs'}", "checkpoint.every_steps=0",
        "tracking.export_model=false", "tracking.progress=false", "tracking.sinks=[]",
        "tracking.samples_every_steps=0", *way.words,
    ]  # fmt: skip
