"""The line that a step leaves in spans.jsonl."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.monitoring.step_trace import StepTrace
from penstock.orchestrator.run_directory.json_lines import read_lines
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.errors import StoreUnreachable
from penstock.workers.trainer.report import StepReport, TrainedRows

NOW = 1_000_000.0
NAMES = {"trainer": ["Trainer-policy-0", "Trainer-policy-1"], "rollout": ["Rollout-0"]}


def report(wait_s: float, train_s: float, rows: list[int]) -> StepReport:
    nothing: Any = np.empty(0)
    trained = TrainedRows(*[nothing] * 7)
    return StepReport(1, 0, {}, trained, wait_s, train_s, {"forward": 0.25}, np.array(rows, np.int64))


def traced(tmp_path: Path, told: Mapping[str, Any] | Exception) -> dict[str, Any]:
    directory = RunDirectory.create(load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run"]))

    async def work() -> Mapping[str, Any]:
        if isinstance(told, Exception):
            raise told
        return told

    async def step() -> None:
        times = iter((0.0, NOW - 3.0, NOW, NOW))
        trace = StepTrace(
            directory,
            work,
            lambda role: NAMES[role],
            lambda: {"Rollout-0": "prompts", "Trainer-policy-0": "rollout"},
            group_size=4,
            clock=lambda: next(times),
        )
        trace.begin()
        trace.updated(1, [report(1.5, 1.5, [8, 9]), report(0.5, 1.5, [10, 11])], NOW)
        await trace.close(1)
        await trace.finish()

    asyncio.run(step())
    directory.close()
    assert json.loads((directory.path / "timeline.json").read_text())["traceEvents"]
    [line] = read_lines(directory.path / "spans.jsonl")
    return line


def test_a_step_leaves_who_was_busy_and_what_it_waited_for(tmp_path: Path) -> None:
    told = {
        "now": NOW, "missed": 0, "admitted": [[2, NOW - 4]],
        "leases": [["rollout", "Rollout-0", 2, NOW - 4, NOW - 1.5, 4]],
    }  # fmt: skip
    line = traced(tmp_path, told)
    assert line["step"] == 1
    assert {lane: [name for name, *_ in spans] for lane, spans in line["lanes"].items()} == {
        "Rollout-0": ["rollout", "wait for prompts"],
        "Trainer-policy-0": ["wait for batch", "update"],
        "Trainer-policy-1": ["wait for batch", "update"],
    }
    assert [lane for lane, *_ in line["path"]] == ["Rollout-0", "Trainer-policy-0"]  # of the slowest rank
    assert line["text"] == "step 1 took 3.0 s: 1.5 s waiting for Rollout-0's last group (2), 1.5 s update"
    assert line["lanes"]["Trainer-policy-0"][1][3]["forward"] == 0.25


def test_a_store_that_does_not_answer_leaves_a_line_that_says_so(tmp_path: Path) -> None:
    line = traced(tmp_path, StoreUnreachable("the store has died."))
    assert line["missed"] is None
    assert [what for _, what, *_ in line["path"]] == ["wait for batch", "update"]
