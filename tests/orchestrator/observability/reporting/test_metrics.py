"""A step's numbers, against numbers computed by hand."""

import asyncio
import math
from dataclasses import replace
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.observability.charts.themes import policies_in
from penstock.orchestrator.observability.reporting.metrics import StepTimes, joined, rank_metrics, step_metrics
from penstock.orchestrator.observability.reporting.step_log import StepLog
from penstock.store.client.lease import Share
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Publication
from penstock.workers.trainer.step_report import StepReport, TrainedRows

TIMES = StepTimes(
    step_s=2.0, phase_s={"rollout": 1.2, "train": 0.5, "evaluation": 0.1}, busy_s={"rollout": 1.5, "train": 0.5}
)


def rows_of(lengths: list[int], version: int = 4, reward: list[float] | None = None) -> Rows:
    columns: dict[str, list[object]] = {
        "prompt_ids": [[1, 2] for _ in lengths],
        "response_ids": [list(range(length)) for length in lengths],
        "finish_reason": ["length" if length == max(lengths) else "stop" for length in lengths],
        "token_versions": [[version - (index % 2)] * length for index, length in enumerate(lengths)],
    }
    return Rows.from_lists(columns | ({"reward": list(reward)} if reward is not None else {}))


def test_metrics_of_a_batch_by_hand() -> None:
    arrays = TrainedRows.of(rows_of([2, 6], reward=[1.0, 0.0]), 4)
    metrics = step_metrics(
        5, 5, arrays, TIMES, trainer={"actor/kl": 0.1}, store={"dropped/reward_error": 1.0}, generated_length_mean=5.0
    )
    assert metrics == {
        "step": 5,
        "policy_version": 5,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/p10": pytest.approx(0.1),
        "reward/p50": 0.5,
        "reward/p90": pytest.approx(0.9),
        "response_length/mean": 4.0,
        "response_length/max": 6.0,
        "response_length/p10": pytest.approx(2.4),
        "response_length/p50": 4.0,
        "response_length/p90": pytest.approx(5.6),
        "response_length/clip_ratio": 0.5,
        "length_bias": pytest.approx(-0.2),
        "staleness/mean": 0.75,  # 2 tokens at 0, 6 at 1
        "staleness/max": 1.0,
        "staleness/p10": pytest.approx(0.1),
        "staleness/p50": 0.5,
        "staleness/p90": pytest.approx(0.9),
        "actor/kl": 0.1,
        "timing_s/step": 2.0,
        "timing_s/rollout": 1.2,
        "timing_s/train": 0.5,
        "timing_s/evaluation": 0.1,
        "idle/rollout": 0.25,
        "idle/train": 0.75,
        "perf/samples_per_s": 1.0,
        "perf/tokens_per_s": 4.0,
        "dropped/reward_error": 1.0,
    }


def test_each_of_several_policies_has_its_own_rewards_and_lengths() -> None:
    names = ["solver", "solver", "proposer"]
    rows = rows_of([2, 6, 3], reward=[1.0, 0.0, -2.0]).with_column("policy", names)
    parts = [TrainedRows.of(rows.select(own), 4) for own in ([0], [], [1, 2])]
    metrics = step_metrics(5, 5, joined(parts), TIMES, trainer={"solver/pg_loss": 0.5})
    assert {name: value for name, value in metrics.items() if name.startswith(("solver", "proposer"))} == {
        "solver/reward/mean": 0.5, "solver/response_length/mean": 4.0, "solver/rows": 2.0, "solver/pg_loss": 0.5,
        "proposer/reward/mean": -2.0, "proposer/response_length/mean": 3.0, "proposer/rows": 1.0,
    }  # fmt: skip
    assert metrics["reward/mean"] == pytest.approx(-1 / 3)
    assert policies_in(metrics) == ["solver", "proposer"]


def test_a_dataflow_without_rewards_has_no_reward_metrics() -> None:
    metrics = step_metrics(1, 1, TrainedRows.of(rows_of([3]), 4), TIMES)
    assert not [name for name in metrics if name.startswith("reward/")]


def test_held_out_accuracy_is_there_only_when_it_was_measured() -> None:
    arrays = TrainedRows.of(rows_of([3]), 4)
    assert "accuracy/heldout" not in step_metrics(1, 1, arrays, TIMES)
    assert step_metrics(1, 1, arrays, TIMES, evaluated={"accuracy/heldout": 0.0})["accuracy/heldout"] == 0.0


def test_idle_shares_lie_between_none_and_all() -> None:
    times = StepTimes(1.0, {}, {"rollout": 1.7, "train": 0.0})
    metrics = step_metrics(1, 1, TrainedRows.of(rows_of([1]), 4), times)
    assert (metrics["idle/rollout"], metrics["idle/train"]) == (0.0, 1.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-2, 2)), min_size=2, max_size=12), st.data())
def test_ranks_shares_together_say_what_the_batch_says(rows: list[tuple[int, float]], data: st.DataObject) -> None:
    whole = rows_of([length for length, _ in rows], reward=[reward for _, reward in rows])
    cut = data.draw(st.integers(1, len(rows) - 1))
    parts = [whole.select(np.arange(0, cut)), whole.select(np.arange(cut, len(rows)))]
    together = joined([TrainedRows.of(part, 4) for part in parts])
    expected, found = (step_metrics(1, 1, arrays, TIMES) for arrays in (TrainedRows.of(whole, 4), together))
    assert all(math.isclose(expected[name], found[name], abs_tol=1e-12) for name in expected)
    assert found.keys() == expected.keys()


def report_of(seconds: float, lengths: list[int], *, speaks: bool = True) -> StepReport:
    rows = TrainedRows.of(rows_of(lengths), 4)
    share = Share(1, 0) if speaks else None
    return StepReport(1, 0, {}, rows, 0.0, 9.0, {"forward": seconds}, np.arange(len(lengths)), share)


def test_the_slowest_of_several_ranks_is_told_with_what_it_may_be_slow_by() -> None:
    assert rank_metrics([report_of(1.0, [3])]) == {}
    found = rank_metrics([report_of(1.0, [3]), report_of(4.0, [30]), report_of(2.0, [3])])
    assert (found["ranks/slowest"], found["ranks/forward_s_slowest"], found["ranks/forward_s_others"]) == (
        1.0,
        4.0,
        1.5,
    )
    assert found["ranks/tokens_spread"] == pytest.approx(32 / 14)  # prompts have 2 each
    assert "ranks/tokens_spread" not in rank_metrics([report_of(1.0, [3]), report_of(2.0, [3], speaks=False)])


def test_hashes_of_ranks_and_of_published_weights_are_in_the_line_of_their_step() -> None:
    fleet, sink = MagicMock(**{"teams.return_value": [], "role.return_value": []}), MagicMock()
    fleet.roll_call.ask = AsyncMock(return_value=[])
    log = StepLog(fleet, MagicMock(), AsyncMock(return_value={}), MagicMock(), MagicMock(), [sink], dict)

    async def body() -> None:
        for version in (1, 2):
            log.published(Publication("root", version, 8, checksum=version))
        for step in (1, 2):
            await log.write(step, [replace(report_of(1.0, [2]), hashes={"tokens": 2**128 - step})] * 2, {})

    asyncio.run(body())
    lines = [call.args[1] for call in sink.log.call_args_list]
    assert [(line["hash/tokens"], line["hash/weights"]) for line in lines] == [
        (f"{2**128 - 2:032x}", f"{1:032x}"),
        (f"{2**128 - 4:032x}", f"{2:032x}"),
    ]
