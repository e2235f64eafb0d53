"""The metrics of one step, under the names that `metrics.jsonl`, TensorBoard and Ray's gauges share.

Pure: arrays and dictionaries in, one flat dictionary out. The controller collects the parts (rows trained, the
trainer's report, seconds by phase, the store's counters) and calls `step_metrics` once a step.

Legend: _N rows (samples) of the step's batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from penstock.workers.trainer.step_report import StepReport, TrainedRows

PHASES = ("rollout", "reward", "reference", "train", "publish", "checkpoint")
"""Phases of `timing_s/` and of the report's plot of time, besides `step`."""
REWARDS = "rewards_N"
GROUPS = "rollout/groups/"
"""Beginning of the names of metrics that end with an engine's name."""
HASH = "hash/"
"""Beginning of the names of a step's hashes (`workers/trainer/row_hashes.py`)."""
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles that are told of what differs from sample to sample."""


def joined(parts: Sequence[TrainedRows]) -> TrainedRows:
    """Join the rows of all trainer ranks."""
    arrays = [field.name for field in fields(TrainedRows) if field.name != REWARDS]
    together: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays}
    names = dict.fromkeys(name for part in parts for name in part.rewards_N)
    rewards = {name: np.concatenate([part.rewards_N[name] for part in parts]) for name in names}
    return TrainedRows(**together, rewards_N=rewards)


@dataclass(frozen=True)
class StepTimes:
    """Times of a step. Phases overlap when `max_staleness > 0`, so they need not sum to `step_s`."""

    step_s: float
    phase_s: Mapping[str, float]
    """Seconds of each phase, by name of `PHASES`, as the controller or the workers saw them."""
    busy_s: Mapping[str, float]
    """Seconds that the workers of a side computed, averaged over them: rollout, train."""


def step_metrics(
    step: int,
    policy_version: int,
    rows: TrainedRows,
    times: StepTimes,
    *,
    trainer: Mapping[str, float] | None = None,
    store: Mapping[str, float] | None = None,
    generated_length_mean: float | None = None,
    evaluated: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The line of metrics.jsonl of a step.

    `trainer`: the update's own metrics (`actor/…`, `mismatch/…`), taken as they are. `store`: its counters (`store/…`,
    `dropped/…`). `generated_length_mean`: mean length of all responses sampled since the last step, for the length bias
    of what was trained. `evaluated`: `accuracy/…`, where it was measured after this step.
    """
    metrics = update_metrics(step, policy_version, rows, trainer, generated_length_mean)
    return metrics | dict(evaluated or {}) | time_metrics(rows, times) | dict(store or {})


def update_metrics(
    step: int,
    policy_version: int,
    rows: TrainedRows,
    trainer: Mapping[str, float] | None = None,
    generated_length_mean: float | None = None,
) -> dict[str, Any]:
    """Metrics of a step that are known as soon as its update is made: those of its rows, and the update's own."""
    metrics: dict[str, Any] = {"step": step, "policy_version": policy_version}
    metrics |= reward_metrics(rows) | length_metrics(rows, generated_length_mean) | staleness_metrics(rows)
    return metrics | policy_metrics(rows) | dict(trainer or {})


def policy_metrics(rows: TrainedRows) -> dict[str, float]:
    """Number of rows, mean reward and mean length of each policy, where several are trained."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(rows.policies_N.tolist()):
        own_N = rows.policies_N == name
        reward_N = rows.reward_N[own_N & np.isfinite(rows.reward_N)]
        found |= {f"{name}/reward/mean": float(reward_N.mean())} if len(reward_N) else {}
        found |= {
            f"{name}/response_length/mean": float(rows.response_tokens_N[own_N].mean()),
            f"{name}/rows": float(own_N.sum()),
        }
    return found


def reward_metrics(rows: TrainedRows) -> dict[str, float]:
    """Statistics of the rewards, over samples. Empty for a dataflow without rewards."""
    reward_N = rows.reward_N[np.isfinite(rows.reward_N)]
    if not len(reward_N):
        return {}
    return (
        {
            "reward/mean": float(reward_N.mean()),
            "reward/std": float(reward_N.std()),
            "reward/min": float(reward_N.min()),
            "reward/max": float(reward_N.max()),
        }
        | quantiles("reward", reward_N)
        | {
            f"reward/{name}": float(np.nanmean(values))  # NaN: the sample does not count for this reward
            for name, values in rows.rewards_N.items()
            if np.isfinite(values).any()
        }
    )


def length_metrics(rows: TrainedRows, generated_length_mean: float | None = None) -> dict[str, float]:
    """Response lengths in tokens, and turns where there are several. `length_bias`: how much longer than the generated
    ones the trained responses are, as a share; negative when a window or a drop favours short ones."""
    if not len(rows.response_tokens_N):
        return {}
    mean = float(rows.response_tokens_N.mean())
    metrics = {
        "response_length/mean": mean,
        "response_length/max": float(rows.response_tokens_N.max()),
        "response_length/clip_ratio": float(rows.clipped_N.mean()),
    } | quantiles("response_length", rows.response_tokens_N)
    if rows.turns_N.max() > 1:
        metrics |= {"turns/mean": float(rows.turns_N.mean()), "turns/max": float(rows.turns_N.max())}
    if generated_length_mean:
        metrics["length_bias"] = mean / generated_length_mean - 1.0
    return metrics


def staleness_metrics(rows: TrainedRows) -> dict[str, float]:
    """Staleness over tokens, in versions; quantiles over samples, each by the mean of its tokens."""
    tokens = int(rows.response_tokens_N.sum())
    if not tokens:
        return {}
    return {
        "staleness/mean": float(rows.staleness_sum_N.sum() / tokens),
        "staleness/max": float(rows.staleness_max_N.max()),
    } | quantiles("staleness", rows.staleness_sum_N / np.maximum(1, rows.response_tokens_N))


def quantiles(name: str, values_N: np.ndarray) -> dict[str, float]:
    """Quantiles over samples, of which there is at least one.

    >>> quantiles("reward", np.array([0.0, 1.0, 2.0]))
    {'reward/p10': 0.2, 'reward/p50': 1.0, 'reward/p90': 1.8}
    """
    found = np.quantile(values_N, list(QUANTILES.values())).tolist()
    return {f"{name}/{key}": float(value) for key, value in zip(QUANTILES, found, strict=True)}


def rank_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """The slowest of several ranks, and by how much: seconds of its forward passes, and the median of the others'.
    `ranks/tokens_spread`: the most tokens of a rank over the mean, which may be why a rank is slow."""
    forward = np.array([report.seconds.get("forward", 0.0) for report in reports])
    if len(forward) < 2:
        return {}
    slowest = int(forward.argmax())
    tokens = np.array([int((report.rows.response_tokens_N + report.rows.prompt_tokens_N).sum()) for report in reports])
    tokens = tokens[[report.share is not None for report in reports]]  # others have the same rows as one of these
    spread = {"ranks/tokens_spread": float(tokens.max() / tokens.mean())} if len(tokens) > 1 and tokens.any() else {}
    return {
        "ranks/slowest": float(slowest),
        "ranks/forward_s_slowest": float(forward[slowest]),
        "ranks/forward_s_others": float(np.median(np.delete(forward, slowest))),
    } | spread


def hash_metrics(hashes: Mapping[str, int]) -> dict[str, str]:
    """Hashes of a step by quantity, 32 hexadecimal digits each.

    >>> hash_metrics({"tokens": 255})
    {'hash/tokens': '000000000000000000000000000000ff'}
    """
    return {f"{HASH}{name}": f"{value:032x}" for name, value in hashes.items()}


def time_metrics(rows: TrainedRows, times: StepTimes) -> dict[str, float]:
    """Seconds by phase, idle shares, and throughput counted on what was trained."""
    metrics = {"timing_s/step": times.step_s}
    metrics |= {f"timing_s/{phase}": times.phase_s[phase] for phase in PHASES if phase in times.phase_s}
    metrics |= {f"timing_s/{phase}": seconds for phase, seconds in times.phase_s.items() if phase not in PHASES}
    if times.step_s <= 0:
        return metrics
    for side, busy_s in times.busy_s.items():
        metrics[f"idle/{side}"] = min(1.0, max(0.0, 1.0 - busy_s / times.step_s))
    metrics["perf/samples_per_s"] = len(rows.response_tokens_N) / times.step_s
    metrics["perf/tokens_per_s"] = float(rows.response_tokens_N.sum()) / times.step_s
    return metrics
