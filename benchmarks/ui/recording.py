"""Time that a run's controller spends on its records, against a step of the demo that has just been run."""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet
from rich.console import Console

from benchmarks.harness import Target
from benchmarks.learning import penstock
from penstock.algorithms.catalogue import build_dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.sample_log import SampleLog
from penstock.orchestrator.observability.reporting.sinks import log_to, opened_sinks
from penstock.orchestrator.observability.state_log import LEAST_S
from penstock.orchestrator.observability.step_trace import StepTrace
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.data.rows import Rows
from penstock.workers.trainer.step_report import StepReport, TrainedRows

DEMO = ["recipe=arithmetic", "warm_start.recipe=null", "evaluation.every_steps=1000000", "tracking.export_model=false"]
NUM_STEPS, SETTLE_STEPS = 14, 3
REPEATS = 100
NUM_GROUPS = 32
SAMPLES_EVERY = 10
"""The default of `tracking.samples_every_steps`."""


def rounds(work: Path, num_rounds: int, num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
    """Measure milliseconds, by part; the demo's step once."""
    penstock([*DEMO, f"trainer.max_steps={num_steps}", "name=demo", f"output_dir={work}"], work / "demo.log")
    demo = RunDirectory.open(work / "demo")
    lines = demo.read_metrics()
    steps = [
        line["timing_s/step"] for line in lines if line["step"] > SETTLE_STEPS and "timing_s/evaluation" not in line
    ]
    state = json.loads((demo.path / "state.json").read_text())
    found = [{"part": "step", "ms": 1000 * statistics.median(steps)}]
    for number in range(num_rounds):
        config = load_config([*DEMO, f"output_dir={work}", f"name=recorded-{number}", "tracking.samples_every_steps=1"])
        found += [{"part": part, "ms": ms} for part, ms in recorded(config, lines[-1], samples_of(demo), state).items()]
    return found


def recorded(config: RunConfig, line: dict[str, Any], rows: Rows, state: dict[str, Any]) -> dict[str, float]:
    """Measure milliseconds of one of each: a step's numbers to all sinks and the display, an event, and a step's
    samples: how long the controller's loop is kept, and how long the thread takes."""
    directory = RunDirectory.create(config)
    with Path("/dev/null").open("w") as nowhere, opened_sinks(config, directory) as sinks:
        progress = ProgressDisplay(
            config, "recorded", console=Console(file=nowhere), failed_writes=directory.failed_writes
        )

        def numbers(step: int) -> None:
            log_to(sinks, step, line | {"step": step}, directory.failed_writes)
            progress.step(step, line)

        found = {
            "numbers": each(numbers),
            "event": each(lambda step: directory.event("checkpoint", step=step)),
            "timeline": asyncio.run(traced(directory)),
            "state": each(lambda step: directory.write_state(state)),
            "samples, thread": each(lambda step: directory.write_samples(step, rows)),
            "samples, loop": asyncio.run(handed_over(config, directory, rows)),
        }
        progress.close()
    directory.close()
    return found


def each(act: Callable[[int], None]) -> float:
    """Median of repeated calls, in milliseconds."""
    seconds = []
    for step in range(1, REPEATS + 1):
        started = time.perf_counter()
        act(step)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


async def handed_over(config: RunConfig, directory: RunDirectory, rows: Rows) -> float:
    """Median of `SampleLog.write`, without what a store takes to find the rows."""

    async def last_batch(columns: list[str]) -> Rows:
        return rows

    log, seconds = SampleLog(config, build_dataflow(config.algorithm), directory, last_batch, list), []
    for step in range(1, REPEATS + 1):
        started = time.perf_counter()
        await log.write(step, len(rows))
        seconds.append(time.perf_counter() - started)
        await log.flush()
    return 1000 * statistics.median(seconds)


async def traced(directory: RunDirectory) -> float:
    """Median of a step's line in the timeline, thread and loop together, but for the store's answer: a batch of the
    demo, of which each stage has had each group by itself."""
    stages = [("rollout", "Rollout-0"), ("reward", "Reward-0"), ("group_advantage", "Compute-group_advantage")]

    async def work() -> dict[str, Any]:
        now = time.time()
        leases = [[stage, owner, group, now - 1, now, 8] for stage, owner in stages for group in range(NUM_GROUPS)]
        return {
            "now": now,
            "missed": 0,
            "leases": leases,
            "admitted": [[group, now - 1] for group in range(NUM_GROUPS)],
        }

    trace, seconds = StepTrace(directory, work, lambda role: [role], lambda: dict(stages), 8), []
    nothing: Any = np.empty(0)
    report = StepReport(1, 0, {}, TrainedRows(*[nothing] * 7), 0.5, 0.5, {}, np.arange(8 * NUM_GROUPS))
    for step in range(1, REPEATS + 1):
        trace.updated(step, [report], time.time())
        started = time.perf_counter()
        await trace.close(step)
        await trace.finish()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def samples_of(demo: RunDirectory) -> Rows:
    """Read the newest samples, as the store hands them out."""
    table = parquet.read_table(demo.sample_files()[-1]).combine_chunks()
    ids = [table[name].to_numpy() for name in ("row_id", "group_id")]
    return Rows(*ids, table.drop_columns(["row_id", "group_id"]))


def median(rows: list[dict[str, Any]], part: str) -> float:
    return statistics.median(row["ms"] for row in rows if row["part"] == part)


def a_step(rows: list[dict[str, Any]]) -> float:
    """Milliseconds of a step, loop and thread together: its numbers, an event, its line of the timeline, and its share
    of the samples and of what is written every few seconds."""
    samples = median(rows, "samples, loop") + median(rows, "samples, thread")
    state = median(rows, "state") * median(rows, "step") / (1000 * LEAST_S)
    return sum(median(rows, part) for part in ("numbers", "event", "timeline")) + samples / SAMPLES_EVERY + state


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    share = 100 * a_step(rows) / median(rows, "step")
    return [Target("recording, of a step of the demo", share, "%", "<=", 1.0)]
