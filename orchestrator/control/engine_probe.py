"""Has engines score a few rows again that the trainer has scored under the same weights (`workers/trainer/probe.py`),
while the next version is being written, and compares. It ends no run: an engine that is lost is noticed where it is
watched.
"""

from collections.abc import Sequence

import numpy as np

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import outcomes
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.workers.protocols import SampleCall, SampleOutput, Sampling
from penstock.workers.trainer.step_report import ProbeRow, StepReport

PROBE_S = 1.0
"""Seconds for engines to answer, for which the next version may wait; they have room for one sequence more."""
MEAN, LARGEST = "probe/logprob_abs_mean", "probe/logprob_abs_max"
"""Metrics: mean and largest |Δ log p| over all engines and tokens."""
WORST, UNANSWERED = "probe/engine_max", "probe/unanswered"
"""Metrics: the largest mean of an engine, and the number of calls without an answer."""


class EngineProbe:
    """Lifecycle: `compare` after each step, before the next version is loaded."""

    def __init__(self, fleet: Fleet, weights: WeightSync, max_length: int) -> None:
        """`max_length`: tokens that an engine has room for (`rollout.max_model_len`)."""
        self._fleet, self._weights, self._max_length = fleet, weights, max_length

    async def compare(self, reports: Sequence[StepReport]) -> dict[str, float]:
        """Compare the engines that have the trainer's version of before the step. Returns metrics; empty where there is
        nothing to compare."""
        rows = [row for report in reports for row in report.probe if len(row.token_ids) < self._max_length]
        engines = [
            (name, handle)
            for name, handle in self._fleet.role("rollout")
            if self._weights.serving.get(name, 0) == reports[0].version
        ]
        requests = [(call_of(row), f"probe-{reports[0].step}-{index}") for index, row in enumerate(rows)]
        calls = [(name, handle.sample.remote(None, *request)) for name, handle in engines for request in requests]
        answers = await outcomes(calls, phase="probe", timeout_s=PROBE_S)
        found: dict[str, list[np.ndarray]] = {}
        for (name, _), row, answer in zip(calls, rows * len(engines), answers, strict=True):
            if isinstance(answer, SampleOutput):
                found.setdefault(name, []).append(difference(row, answer))
        return metrics_of(found, sum(isinstance(answer, PenstockError) for answer in answers)) if calls else {}


def call_of(row: ProbeRow) -> SampleCall:
    """The request for a row's log-probabilities."""
    return SampleCall(row.token_ids.tolist(), 1, Sampling(max_tokens=1, seed=0), prompt_logprobs=True)


def difference(row: ProbeRow, answer: SampleOutput) -> np.ndarray:
    """|Δ log p| of the row's tokens that the trainer has scored, `[T]` float32."""
    assert answer.prompt_logprobs is not None
    found_T: np.ndarray = np.abs(answer.prompt_logprobs[len(row.token_ids) - len(row.logprobs) :] - row.logprobs)
    return found_T


def metrics_of(found: dict[str, list[np.ndarray]], unanswered: int) -> dict[str, float]:
    """Metrics of what the engines' answers differ by, `[T]` for each row of each engine."""
    metrics = {UNANSWERED: float(unanswered)} if unanswered else {}
    if not found:
        return metrics
    of_engines = {name: np.concatenate(parts) for name, parts in found.items()}
    every = np.concatenate(list(of_engines.values()))
    worst = max(float(each.mean()) for each in of_engines.values())
    return metrics | {MEAN: float(every.mean()), LARGEST: float(every.max()), WORST: worst}
