"""Rules of the diagnosis, which find what is wrong with a run from the metrics of its steps. Pure.

A rule is a function of what a run has measured so far; it returns a `Finding` or nothing. A warning says that something
is broken or wasted; a hint, that it could be faster.
"""

import statistics
from collections import Counter

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.observability.diagnosis.history import HINT, Finding, History, Rule

SAME = 1e-9
"""Largest difference of rewards that count as the same."""
FILTERED = "no_signal"
OF_THE_TASK = (FILTERED, "prompt_too_long", "held_out", "no_answer")
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


# Learning: whether there is something to learn from, and whether the policy still does.


def no_spread(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    spread, mean, best = history.last("reward/std"), history.last("reward/mean"), history.last("reward/max")
    if len(spread) < history.window or max(spread) > SAME or not best:
        return None
    risen = mean and (first := history.first("reward/mean")) and mean[-1] > first[0] + SAME
    return Finding(
        "no_spread",
        f"all samples of the last {history.window} steps have had the reward {best[-1]:g}, so nothing is learned",
        "The task may be solved: end the run, or take harder problems." if risen else
        "Read some rollouts: the task may be too hard, its format unknown to the model, or the reward wrong.",
    )  # fmt: skip


def cut_off(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    shares = history.last("response_length/clip_ratio")
    if len(shares) < history.window or (share := statistics.fmean(shares)) <= config.cut_off_share:
        return None
    return Finding(
        "cut_off",
        f"{share:.0%} of the responses end at the limit of tokens",
        "Raise rollout.sampling.max_tokens (in environments: environment.max_tokens and max_turns), or have the reward "
        "punish length.",
    )


def mismatch(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    key = "mismatch/logprob_abs_mean"
    now, first = history.last(key), history.first(key)
    if len(now) < history.window:
        return None
    mean, before = statistics.fmean(now), statistics.fmean(first)
    advice = "Compare rollout.dtype with the trainer's; algorithm.correction weighs tokens by the difference."
    if mean > config.largest_mismatch(is_exact=False):
        return Finding("mismatch", f"trainer and engine differ by |Δ log p| {mean:.2g} a token", advice)
    if mean > max(1e-3, config.mismatch_growth * before):
        return Finding("mismatch", f"|Δ log p| between trainer and engine grew from {before:.1g} to {mean:.1g}", advice)
    return None


def other_distribution(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    counts = {kind: sum(history.last(f"environment/turns_{kind}")) for kind in ("greedy", "structured", "narrowed")}
    turns = sum(history.last("environment/turns"))
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


def gradients(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    skipped = sum(history.last("actor/skipped_nonfinite"))
    if skipped:
        return Finding(
            "gradients",
            f"{skipped:g} optimizer step(s) of the last {history.window} were skipped, as gradients were not finite",
            "Lower trainer.optimizer.lr, or look for rewards and lengths that stand out.",
        )
    now, first = history.last("actor/grad_norm"), history.first("actor/grad_norm")
    if len(now) < history.window:
        return None
    usual = statistics.median(first)
    if usual > 0 and statistics.median(now) > config.grad_norm_growth * usual:
        return Finding(
            "gradients",
            f"gradients grew from a norm of {usual:.2g} to {statistics.median(now):.2g}",
            "Lower trainer.optimizer.lr.",
        )
    return None


def entropy(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    now, first = history.last("actor/entropy"), history.first("actor/entropy")
    reward, before = history.last("reward/mean"), history.first("reward/mean")
    if len(now) < history.window or len(reward) < history.window:
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


def far_from_reference(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    distance = history.last("actor/kl")
    if len(distance) < history.window or (mean := statistics.fmean(distance)) <= config.kl:
        return None
    return Finding(
        "kl",
        f"the policy is {mean:.1f} nats a token away from its reference",
        "Raise algorithm.kl_coef, or lower trainer.optimizer.lr.",
    )


# Waste: work that is lost or waited for.


def dropped(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    reasons = {key.removeprefix("dropped/"): history.increase(key) for key in history.named("dropped/")}
    lost = {reason: count for reason, count in reasons.items() if count > 0 and reason not in OF_THE_TASK}
    every = sum(lost.values()) + history.increase("store/rows_trained")
    if not lost or sum(lost.values()) <= config.dropped_share * every:
        return None
    told = ", ".join(f"{reason} {count:g}" for reason, count in sorted(lost.items(), key=lambda item: -item[1]))
    return Finding(
        "dropped",
        f"{sum(lost.values()) / every:.0%} of the samples of the last {history.window} steps were dropped: {told}",
        "`penstock status` says what their workers said of them.",
    )


def filtered(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    gone, trained = history.increase(f"dropped/{FILTERED}"), history.increase("store/rows_trained")
    if not gone or gone <= config.filtered_share * (gone + trained):
        return None
    return Finding(
        "filtered", f"{gone / (gone + trained):.0%} of the samples were filtered out: their groups agree on the reward",
        "Take problems that are neither solved nor out of reach, or a larger algorithm.group_size.", HINT,
    )  # fmt: skip


def lazy_engine(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    names = history.named(ENGINE)
    there = history.last("rollout/num_engines")
    if len(names) < 2 or not there or min(there) < len(names):  # one of them has left, or was away
        return None
    groups = {name: history.increase(name) for name in names if history.is_throughout(name)}
    if len(groups) < len(names) or (mean := statistics.fmean(groups.values())) < LEAST_GROUPS:
        return None
    laziest = min(groups, key=lambda name: groups[name])
    if groups[laziest] >= config.engine_share * mean:
        return None
    title, window = laziest.rpartition("/")[2], history.window
    return Finding(
        "lazy_engine",
        f"{title} has sampled {groups[laziest]:g} groups in {window} steps, an engine {mean:.0f} on the average",
        "Look at what else its node computes, and at its log; `penstock status` says what it is at.",
    )


def slow_rank(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    slowest, own = history.last("ranks/slowest"), sum(history.last("ranks/forward_s_slowest"))
    others, step = sum(history.last("ranks/forward_s_others")), sum(history.last("timing_s/step"))
    if len(slowest) < history.window or own <= config.rank_slowdown * others or own - others <= HELD_UP * step:
        return None
    rank, count = Counter(slowest).most_common(1)[0]
    if count < SAME_RANK * history.window:
        return None
    has_more = statistics.fmean(history.last("ranks/tokens_spread") or [1.0]) > config.rank_slowdown
    return Finding(
        "slow_rank",
        f"rank {rank:g} takes {own / max(others, 1e-9):.1f} times as long as the others for its forward passes",
        "It has far more tokens than they do: raise trainer.groups_per_step, so that rows even out." if has_more else
        "Look at what else its node or device computes: the others wait for it.",
    )  # fmt: skip


def padding(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    shares = history.last("actor/padding_share")
    train, step = sum(history.last("timing_s/train")), sum(history.last("timing_s/step"))
    if len(shares) < history.window or (share := statistics.fmean(shares)) <= config.padding_share:
        return None
    if train <= config.idle_share * step:  # nobody would be faster without it
        return None
    return Finding(
        "padding", f"{share:.0%} of what ranks compute is padding",
        "Set trainer.packing=always, which leaves none, or lower trainer.max_tokens_per_microbatch, so that only rows "
        "of like length share a micro-batch.", HINT,
    )  # fmt: skip


def idle(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    step = sum(history.last("timing_s/step"))
    if not step:
        return None
    if max_staleness == 0:
        hidden = min(sum(history.last("timing_s/rollout")), sum(history.last("timing_s/train"))) / step
        if hidden <= config.idle_share / 2:
            return None
        return Finding(
            "idle", f"engines and ranks take turns: {hidden:.0%} of a step one waits for the other",
            f"max_staleness=1 would hide up to {hidden:.0%} of the step.", HINT,
        )  # fmt: skip
    of_ranks, of_engines = history.last("idle/train"), history.last("idle/rollout")
    ranks = statistics.fmean(of_ranks) if of_ranks else 0.0
    engines = statistics.fmean(of_engines) if of_engines else 0.0
    if ranks > config.idle_share:
        advice = _feeding(history, ranks, engines > config.idle_share)
        return Finding("idle", f"ranks wait {ranks:.0%} of the step for samples", advice, HINT)
    if engines > config.idle_share:
        fewer = f"{1 - engines:.0%} of the engines would do"
        advice = f"Raise max_staleness, or have more ranks and fewer engines: {fewer}."
        return Finding("idle", f"engines wait {engines:.0%} of the step", advice, HINT)
    return None


def _feeding(history: History, ranks: float, engines_wait: bool) -> str:
    """Advice on how to give the ranks their samples sooner. `ranks`: the share of the step that they wait."""
    if engines_wait:
        others = {name: sum(history.last(f"timing_s/{name}")) for name in SLOW_STAGES}
        slowest = max(others, key=lambda name: others[name])
        if others[slowest] > sum(history.last("timing_s/rollout")):
            return f"Engines wait as well: {SLOW_STAGES[slowest]}"
        return "Engines wait as well: raise max_staleness, so that more groups are under way."
    key = (
        "environment.num_workers or rollout.num_workers" if history.last("environment/turns") else "rollout.num_workers"
    )
    return f"Raise {key}: {1 / max(0.01, 1 - ranks):.1f} times as many would keep the ranks busy."


def evaluation(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    spent, step = sum(history.last("timing_s/evaluation")), sum(history.last("timing_s/step"))
    if not step or spent <= config.evaluation_share * step:
        return None
    return Finding(
        "evaluation", f"evaluation takes {spent / step:.0%} of the time",
        "Raise evaluation.every_steps, or lower evaluation.num_problems.", HINT,
    )  # fmt: skip


# All of them.

RULES: tuple[Rule, ...] = (
    no_spread, cut_off, mismatch, other_distribution, gradients, entropy, far_from_reference, dropped, filtered,
    lazy_engine, slow_rank, padding, idle, evaluation,
)  # fmt: skip


def findings(history: History, config: DiagnosisConfig, max_staleness: int) -> list[Finding]:
    """Findings of all rules."""
    if not history.is_long_enough:
        return []
    return [found for rule in RULES if (found := rule(history, config, max_staleness)) is not None]
