"""The line that a step leaves in spans.jsonl, and its spans by lane, few enough to be kept."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.step_trace import FINE, StepTrace, lanes_of, with_waits
from penstock.orchestrator.run_directory.json_lines import read_lines
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.timeline import Span, Work, WorkReport
from penstock.store.errors import StoreUnreachable
from penstock.workers.trainer.step_report import StepReport, TrainedRows

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


def test_a_lane_of_a_role_stands_for_all_of_its_members() -> None:
    lanes = lanes_of([Span("engines", "evaluate", 1.0, 2.0)], [], {"engines": ["Rollout-0", "Rollout-1"]})
    assert {lane: [(span.name, span.start, span.end) for span in spans] for lane, spans in lanes.items()} == {
        "Rollout-0": [("evaluate", 1.0, 2.0)],
        "Rollout-1": [("evaluate", 1.0, 2.0)],
    }


def test_an_engine_has_a_span_a_group_and_a_reward_one_for_what_it_did_in_a_row() -> None:
    work = [
        Work("rollout", "Rollout-0", 1, 0.0, 1.0, 4),
        Work("rollout", "Rollout-0", 2, 0.0, 3.0, 4),
        Work("reward", "Reward-0", 1, 1.0, 1.1, 4),
        Work("reward", "Reward-0", 2, 1.1, 1.2, 2),
        Work("reward", "Reward-0", 2, 3.0, 3.1, 2),
    ]
    lanes = lanes_of([], work, {})
    assert [(span.start, span.end, span.details) for span in lanes["Rollout-0"]] == [
        (0.0, 1.0, {"group": 1, "groups": 1, "rows": 4}),
        (0.0, 3.0, {"group": 2, "groups": 1, "rows": 4}),
    ]
    assert [(span.start, span.end, span.details) for span in lanes["Reward-0"]] == [
        (1.0, 1.2, {"rows": 6}),
        (3.0, 3.1, {"rows": 2}),
    ]


def test_very_many_groups_of_an_engine_are_as_many_spans_as_can_be_told_apart() -> None:
    work = [Work("rollout", "Rollout-0", number, 0.0, 1.0 + number / 10_000) for number in range(10_000)]
    spans = lanes_of([], work, {})["Rollout-0"]
    assert len(spans) <= FINE
    assert sum(span.details["groups"] for span in spans) == 10_000
    assert max(span.end for span in spans) == 1.9999


def test_times_of_a_machine_whose_clock_differs_are_moved_to_this_one() -> None:
    told = {
        "now": 1000.0,
        "leases": [["rollout", "Rollout-0", 3, 990.0, 999.0, 8]],
        "admitted": [[3, 989.0]],
        "missed": 0,
    }
    near, far = WorkReport.of(told, 1000.1), WorkReport.of(told, 1060.0)
    assert (near.work[0].end, near.admitted[3]) == (999.0, 989.0)  # the answer took a moment
    assert (far.work[0].end, far.admitted[3]) == (1059.0, 1049.0)


def test_who_does_nothing_for_long_waits_for_what_comes_before() -> None:
    spans = [Span("Rollout-0", "rollout", -1.0, 2.0), Span("Rollout-0", "load weights", 6.0, 7.0)]
    lanes = with_waits(
        {"Rollout-0": spans, "checkpoint": []}, 0.0, 10.0, {"Rollout-0": "prompts", "Reward-0": "rollout"}
    )
    assert {lane: [(span.name, span.start, span.end) for span in found] for lane, found in lanes.items()} == {
        "Reward-0": [("wait for rollout", 0.0, 10.0)],
        "Rollout-0": [
            ("rollout", -1.0, 2.0),
            ("wait for prompts", 2.0, 6.0),
            ("load weights", 6.0, 7.0),
            ("wait for prompts", 7.0, 10.0),
        ],
        "checkpoint": [],
    }
