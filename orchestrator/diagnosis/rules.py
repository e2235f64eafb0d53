"""What is wrong with a run, rule by rule, from the numbers of its steps. Pure.

Each rule is a function of what a run has measured so far; it returns a `Finding` or nothing. A warning says that
something is broken or wasted; a hint, that it could be faster.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.diagnosis import DiagnosisConfig

WARNING, HINT = "warning", "hint"
OF_THE_TASK = ("no_signal", "prompt_too_long")
"""Reasons of drops that nothing is wrong with: an algorithm's filter, and rows that were never meant to fit."""
SAME = 1e-9
"""Rewards that differ by no more are the same."""


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str
    """What was seen, with its numbers."""
    advice: str
    level: str = WARNING


class Seen:
    """The numbers of a run's first steps and of its last ones: all that rules look at, so that a long run's memory
    stays bounded."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._first: dict[str, list[float]] = {}
        """By metric."""
        self._last: deque[Mapping[str, Any]] = deque(maxlen=window + 1)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Those of the next step."""
        for key in metrics:
            known = self._first.setdefault(key, [])
            if len(known) < self.window:
                known += _values([metrics], key)
        self._last.append(metrics)

    def last(self, key: str) -> list[float]:
        """Of those of the last steps that have it."""
        return _values(list(self._last)[-self.window :], key)

    def first(self, key: str) -> list[float]:
        """Of the first steps that have it: as many as `last` at least."""
        return self._first.get(key, [])

    def grown(self, key: str) -> float:
        """By how much a counter that only grows has grown within the window."""
        known = _values(list(self._last), key)
        if not known:
            return 0.0
        return known[-1] - (known[0] if len(self._last) > self.window else 0.0)

    def named(self, prefix: str) -> list[str]:
        return [key for key in self._last[-1] if key.startswith(prefix)] if self._last else []

    @property
    def is_long_enough(self) -> bool:
        return len(self._last) >= self.window


Rule = Callable[[Seen, DiagnosisConfig, int], Finding | None]
"""The last argument is `max_staleness`."""


def findings(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> list[Finding]:
    """Of all rules."""
    if not seen.is_long_enough:
        return []
    return [found for rule in RULES if (found := rule(seen, config, max_staleness)) is not None]


def no_spread(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    spread, mean, best = seen.last("reward/std"), seen.last("reward/mean"), seen.last("reward/max")
    if len(spread) < seen.window or max(spread) > SAME:
        return None
    risen = mean and (first := seen.first("reward/mean")) and mean[-1] > first[0] + SAME
    return Finding(
        "no_spread",
        f"all samples of the last {seen.window} steps have had the reward {best[-1]:g}, so nothing is learned",
        "The task may be solved: end the run, or take harder problems." if risen else
        "Read some rollouts: the task may be too hard, its format unknown to the model, or the reward wrong.",
    )  # fmt: skip


def cut_off(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    shares = seen.last("response_length/clip_ratio")
    if len(shares) < seen.window or (share := statistics.fmean(shares)) <= config.cut_off_share:
        return None
    return Finding(
        "cut_off",
        f"{share:.0%} of the responses end at the limit of tokens",
        "Raise rollout.sampling.max_tokens (in environments: environment.max_tokens and max_turns), or have the reward "
        "punish length.",
    )


def mismatch(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    key = "mismatch/logprob_abs_mean"
    now, first = seen.last(key), seen.first(key)
    if len(now) < seen.window:
        return None
    mean, before = statistics.fmean(now), statistics.fmean(first)
    advice = "Compare rollout.dtype with the trainer's; algorithm.correction weighs tokens by the difference."
    if mean > config.mismatch:
        return Finding("mismatch", f"trainer and engine differ by |Δ log p| {mean:.2g} a token", advice)
    if mean > max(1e-3, config.mismatch_growth * before):
        return Finding("mismatch", f"|Δ log p| between trainer and engine grew from {before:.1g} to {mean:.1g}", advice)
    return None


def gradients(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    skipped = sum(seen.last("actor/skipped_nonfinite"))
    if skipped:
        return Finding(
            "gradients",
            f"{skipped:g} optimizer step(s) of the last {seen.window} were skipped, as gradients were not finite",
            "Lower trainer.optimizer.lr, or look for rewards and lengths that stand out.",
        )
    now, first = seen.last("actor/grad_norm"), seen.first("actor/grad_norm")
    if len(now) < seen.window:
        return None
    usual = statistics.median(first)
    if usual > 0 and statistics.median(now) > config.grad_norm_growth * usual:
        return Finding(
            "gradients",
            f"gradients grew from a norm of {usual:.2g} to {statistics.median(now):.2g}",
            "Lower trainer.optimizer.lr.",
        )
    return None


def entropy(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    now, first = seen.last("actor/entropy"), seen.first("actor/entropy")
    reward, before = seen.last("reward/mean"), seen.first("reward/mean")
    if len(now) < seen.window or len(reward) < seen.window:
        return None
    mean = statistics.fmean(before)
    has_risen = statistics.fmean(reward) > mean + 0.05 * abs(mean)  # it is sure of what it has learned
    if has_risen or statistics.fmean(now) >= config.entropy_share * statistics.fmean(first):
        return None
    return Finding(
        "entropy",
        f"entropy fell from {statistics.fmean(first):.2g} to {statistics.fmean(now):.2g} nats without a higher reward",
        "The policy explores no more: lower trainer.optimizer.lr, or set algorithm.entropy_coef.",
    )


def far_from_reference(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    distance = seen.last("actor/kl")
    if len(distance) < seen.window or (mean := statistics.fmean(distance)) <= config.kl:
        return None
    return Finding(
        "kl",
        f"the policy is {mean:.1f} nats a token away from its reference",
        "Raise algorithm.kl_coef, or lower trainer.optimizer.lr.",
    )


def dropped(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    reasons = {key.removeprefix("dropped/"): seen.grown(key) for key in seen.named("dropped/")}
    lost = {reason: count for reason, count in reasons.items() if count > 0 and reason not in OF_THE_TASK}
    every = sum(lost.values()) + seen.grown("store/rows_trained")
    if not lost or sum(lost.values()) <= config.dropped_share * every:
        return None
    told = ", ".join(f"{reason} {count:g}" for reason, count in sorted(lost.items(), key=lambda item: -item[1]))
    return Finding(
        "dropped",
        f"{sum(lost.values()) / every:.0%} of the samples of the last {seen.window} steps were dropped: {told}",
        "`penstock status` says what their workers said of them.",
    )


def idle(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    step = sum(seen.last("timing_s/step"))
    if not step:
        return None
    if max_staleness == 0:
        hidden = min(sum(seen.last("timing_s/rollout")), sum(seen.last("timing_s/train"))) / step
        if hidden <= config.idle_share / 2:
            return None
        return Finding(
            "idle", f"engines and ranks take turns: {hidden:.0%} of a step one waits for the other",
            f"max_staleness=1 would hide up to {hidden:.0%} of the step.", HINT,
        )  # fmt: skip
    ranks, engines = seen.last("idle/train"), seen.last("idle/rollout")
    if ranks and (share := statistics.fmean(ranks)) > config.idle_share:
        return Finding("idle", f"ranks wait {share:.0%} of the step for samples", "Raise rollout.num_workers.", HINT)
    if engines and (share := statistics.fmean(engines)) > config.idle_share:
        advice = "Raise max_staleness, or have more ranks and fewer engines."
        return Finding("idle", f"engines wait {share:.0%} of the step", advice, HINT)
    return None


def evaluation(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    spent, step = sum(seen.last("timing_s/evaluation")), sum(seen.last("timing_s/step"))
    if not step or spent <= config.evaluation_share * step:
        return None
    return Finding(
        "evaluation", f"evaluation takes {spent / step:.0%} of the time",
        "Raise evaluation.every_steps, or lower evaluation.num_problems.", HINT,
    )  # fmt: skip


RULES: tuple[Rule, ...] = (
    no_spread, cut_off, mismatch, gradients, entropy, far_from_reference, dropped, idle, evaluation,
)  # fmt: skip


def _values(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    found = (line.get(key) for line in lines)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]
