"""Rules about learning: whether there is something to learn from, and whether the policy still does. Pure.

A rule is a function of what a run has measured so far; it returns a `Finding` or nothing.
"""

import statistics

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.observability.diagnosis.seen import HINT, Finding, Seen

SAME = 1e-9
"""Largest difference of rewards that count as the same."""


def no_spread(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    spread, mean, best = seen.last("reward/std"), seen.last("reward/mean"), seen.last("reward/max")
    if len(spread) < seen.window or max(spread) > SAME or not best:
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


def other_distribution(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    counts = {kind: sum(seen.last(f"environment/turns_{kind}")) for kind in ("greedy", "structured", "narrowed")}
    turns = sum(seen.last("environment/turns"))
    if not turns or not any(counts.values()):
        return None
    told = ", ".join(f"{count:g} {kind}" for kind, count in counts.items() if count)
    return Finding(
        "other_distribution",
        f"of {turns:g} turns some were not sampled from what the trainer computes at any temperature: {told}",
        "Sample what is trained without temperature 0, structure, top_p, top_k and min_p, or correct for it "
        "(algorithm.correction). environment.gateway.sampling=run leaves out what clients send.",
        HINT,
    )


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
