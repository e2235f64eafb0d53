"""Looks at engines while the next version is being written: each scores again a row that the trainer has scored under
the same weights, or one that it has sampled itself (`workers/probing.py`). It ends no run: an engine that is lost is
noticed where it is watched.

    kinds x engines, those first that have waited longest ─▶ as many looks as fit into 1% of the step's tokens
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, outcomes
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.workers.probing import ProbeAnswer, ProbeRow
from penstock.workers.trainer.probe import SHARE
from penstock.workers.trainer.step_report import StepReport

PROBE_S = 1.0
"""Seconds for engines to answer, for which the next version may wait; they have room for one sequence more."""
SCORES, SAMPLES = "probe/scores/", "probe/samples/"
"""Kinds of looks, and prefixes of their metrics by engine: mean |Δ log p| of a row of the trainer's, and of a sample of
the engine's own against what it recorded."""
TEMPERATURE, DOUBLED = "probe/temperature/", "probe/doubled/"
"""Prefixes of what is known of an engine's samples: their temperature, as a multiple of what was asked for, and 1 where
a token was written twice."""
MEAN, LARGEST = "probe/logprob_abs_mean", "probe/logprob_abs_max"
"""Metrics: mean and largest |Δ log p| of the trainer's rows, over all engines and tokens."""
WORST, UNANSWERED = "probe/engine_max", "probe/unanswered"
"""Metrics: the largest mean of an engine for them, and the number of calls without an answer."""


@dataclass(frozen=True)
class Look:
    """A call of one engine."""

    kind: str
    engine: str
    row: ProbeRow | None
    """None: a sample of its own."""
    most_tokens: int
    """Most tokens that it scores."""


class EngineProbe:
    """Lifecycle: `compare` after each step, before the next version is loaded."""

    def __init__(self, fleet: Fleet, weights: WeightSync, max_length: int) -> None:
        """`max_length`: tokens that an engine has room for (`rollout.max_model_len`)."""
        self._fleet, self._weights, self._max_length = fleet, weights, max_length
        self._seen: dict[tuple[str, str], int] = {}
        """The step of the last look, by kind and engine."""

    async def compare(self, reports: Sequence[StepReport]) -> dict[str, float]:
        """Compare engines that have the trainer's version of before the step. Returns metrics; empty where there is
        nothing to compare."""
        rows = [row for report in reports for row in report.probe if len(row.token_ids) < self._max_length]
        engines = {
            name: handle
            for name, handle in self._fleet.role("rollout")
            if self._weights.serving.get(name, 0) == reports[0].version
        }
        if not rows:
            return {}
        lengths = np.concatenate([each.rows.prompt_tokens_N + each.rows.response_tokens_N for each in reports])
        looks = list(chosen_looks(self._in_turn(engines), rows, lengths))
        self._seen |= {(look.kind, look.engine): reports[0].step for look in looks}
        calls: Handles = [
            (look.engine, engines[look.engine].probe.remote(reports[0].version, look.row, look.most_tokens))
            for look in looks
        ]
        return metrics_of(looks, await outcomes(calls, phase="probe", timeout_s=PROBE_S))

    def _in_turn(self, engines: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Kinds of looks and engines, in the order in which it is their turn."""
        every = [(kind, name) for kind in (SCORES, SAMPLES) for name in engines]
        return sorted(every, key=lambda one: self._seen.get(one, 0))


def chosen_looks(in_turn: Sequence[tuple[str, str]], rows: Sequence[ProbeRow], lengths_N: np.ndarray) -> Iterator[Look]:
    """The looks of a step, at most one of each kind at an engine: within `SHARE` of the step's tokens, but at least
    one. `rows`: of the trainer's, dealt in turn. `lengths_N`: tokens of each row of the step."""
    left = SHARE * float(lengths_N.sum())
    for number, (kind, name) in enumerate(in_turn):
        row = rows[number % len(rows)] if kind == SCORES else None
        own = int(lengths_N.mean() if number else lengths_N.max())
        most = len(row.token_ids) if row is not None else own
        if number == 0 or most <= left:
            yield Look(kind, name, row, most)
            left -= most


def metrics_of(looks: Sequence[Look], answers: Sequence[ProbeAnswer | PenstockError | None]) -> dict[str, float]:
    """Metrics of what the engines have answered; None: there was nothing to compare."""
    metrics: dict[str, float] = {}
    scored: dict[str, np.ndarray] = {}
    for look, answer in zip(looks, answers, strict=True):
        if isinstance(answer, PenstockError):
            metrics[UNANSWERED] = metrics.get(UNANSWERED, 0.0) + 1
        elif answer is not None:
            metrics[look.kind + look.engine] = float(answer.differences.mean())
            if look.kind == SCORES:
                scored[look.engine] = answer.differences
                continue
            metrics |= {TEMPERATURE + look.engine: answer.temperature} if np.isfinite(answer.temperature) else {}
            metrics |= {DOUBLED + look.engine: 1.0} if answer.is_doubled else {}
    if scored:
        every = np.concatenate(list(scored.values()))
        worst = max(float(each.mean()) for each in scored.values())
        metrics |= {MEAN: float(every.mean()), LARGEST: float(every.max()), WORST: worst}
    return metrics
