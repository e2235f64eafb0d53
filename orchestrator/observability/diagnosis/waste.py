"""Rules about work that is lost or waited for: samples, engines, ranks, padding, evaluation. Pure.

A rule is a function of what a run has measured so far; it returns a `Finding` or nothing.
"""

import statistics
from collections import Counter

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.observability.diagnosis.seen import HINT, Finding, Seen

FILTERED = "no_signal"
OF_THE_TASK = (FILTERED, "prompt_too_long", "held_out")
"""Reasons of drops that are no fault: an algorithm's filter, and rows that were never meant to be trained on."""
ENGINE = "rollout/groups/Rollout-"
"""Prefix of the metrics of what each engine has sampled. Where environments play, they lease the groups, and engines
only answer."""
LEAST_GROUPS = 10
"""Least number of groups of an engine in a window, on average: fewer are spread by chance."""
SLOW_STAGES = {
    "reward": "rewards are slow. Raise reward.num_workers or reward.num_processes.",
    "reference": "the scorers are slow. Give the models that judge more ranks, or a smaller model.",
    "compute": "the stage compute is slow. Make its functions faster.",
}
"""Advice for slow stages, by phase of `timing_s/`."""
SAME_RANK = 0.8
"""Least share of the steps in which one rank has to be the slowest."""
HELD_UP = 0.1
"""Least share of the step that the other ranks have to wait for it."""


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


def filtered(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    gone, trained = seen.grown(f"dropped/{FILTERED}"), seen.grown("store/rows_trained")
    if not gone or gone <= config.filtered_share * (gone + trained):
        return None
    return Finding(
        "filtered", f"{gone / (gone + trained):.0%} of the samples were filtered out: their groups agree on the reward",
        "Take problems that are neither solved nor out of reach, or a larger algorithm.group_size.", HINT,
    )  # fmt: skip


def lazy_engine(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    names = seen.named(ENGINE)
    there = seen.last("rollout/num_engines")
    if len(names) < 2 or not there or min(there) < len(names):  # one of them has left, or was away
        return None
    groups = {name: seen.grown(name) for name in names if seen.is_throughout(name)}
    if len(groups) < len(names) or (mean := statistics.fmean(groups.values())) < LEAST_GROUPS:
        return None
    laziest = min(groups, key=lambda name: groups[name])
    if groups[laziest] >= config.engine_share * mean:
        return None
    title = laziest.rpartition("/")[2]
    return Finding(
        "lazy_engine",
        f"{title} has sampled {groups[laziest]:g} groups in {seen.window} steps, an engine {mean:.0f} on the average",
        "Look at what else its node computes, and at its log; `penstock status` says what it is at.",
    )


def slow_rank(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    slowest, own = seen.last("ranks/slowest"), sum(seen.last("ranks/forward_s_slowest"))
    others, step = sum(seen.last("ranks/forward_s_others")), sum(seen.last("timing_s/step"))
    if len(slowest) < seen.window or own <= config.rank_slowdown * others or own - others <= HELD_UP * step:
        return None
    rank, count = Counter(slowest).most_common(1)[0]
    if count < SAME_RANK * seen.window:
        return None
    has_more = statistics.fmean(seen.last("ranks/tokens_spread") or [1.0]) > config.rank_slowdown
    return Finding(
        "slow_rank",
        f"rank {rank:g} takes {own / max(others, 1e-9):.1f} times as long as the others for its forward passes",
        "It has far more tokens than they do: raise trainer.groups_per_step, so that rows even out." if has_more else
        "Look at what else its node or device computes: the others wait for it.",
    )  # fmt: skip


def padding(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    shares = seen.last("actor/padding_share")
    train, step = sum(seen.last("timing_s/train")), sum(seen.last("timing_s/step"))
    if len(shares) < seen.window or (share := statistics.fmean(shares)) <= config.padding_share:
        return None
    if train <= config.idle_share * step:  # nobody would be faster without it
        return None
    return Finding(
        "padding", f"{share:.0%} of what ranks compute is padding",
        "Lower trainer.max_tokens_per_microbatch, so that only rows of like length share a micro-batch.", HINT,
    )  # fmt: skip


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
    of_ranks, of_engines = seen.last("idle/train"), seen.last("idle/rollout")
    ranks = statistics.fmean(of_ranks) if of_ranks else 0.0
    engines = statistics.fmean(of_engines) if of_engines else 0.0
    if ranks > config.idle_share:
        advice = _feeding(seen, ranks, engines > config.idle_share)
        return Finding("idle", f"ranks wait {ranks:.0%} of the step for samples", advice, HINT)
    if engines > config.idle_share:
        fewer = f"{1 - engines:.0%} of the engines would do"
        advice = f"Raise max_staleness, or have more ranks and fewer engines: {fewer}."
        return Finding("idle", f"engines wait {engines:.0%} of the step", advice, HINT)
    return None


def _feeding(seen: Seen, ranks: float, engines_wait: bool) -> str:
    """Advice on how to give the ranks their samples sooner. `ranks`: the share of the step that they wait."""
    if engines_wait:
        others = {name: sum(seen.last(f"timing_s/{name}")) for name in SLOW_STAGES}
        slowest = max(others, key=lambda name: others[name])
        if others[slowest] > sum(seen.last("timing_s/rollout")):
            return f"Engines wait as well: {SLOW_STAGES[slowest]}"
        return "Engines wait as well: raise max_staleness, so that more groups are under way."
    key = "environment.num_workers or rollout.num_workers" if seen.last("environment/turns") else "rollout.num_workers"
    return f"Raise {key}: {1 / max(0.01, 1 - ranks):.1f} times as many would keep the ranks busy."


def evaluation(seen: Seen, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    spent, step = sum(seen.last("timing_s/evaluation")), sum(seen.last("timing_s/step"))
    if not step or spent <= config.evaluation_share * step:
        return None
    return Finding(
        "evaluation", f"evaluation takes {spent / step:.0%} of the time",
        "Raise evaluation.every_steps, or lower evaluation.num_problems.", HINT,
    )  # fmt: skip
