"""The diagnosis of a run while it trains: what is wrong by the metrics of its steps, and a step that takes too long.

    History    the metrics that rules look at                                 pure
    RULES      functions of a history, which return a `Finding` or None       pure
    Diagnosis  applies the rules to each step, and reports a finding once
    Pace       when a step is too long, by those before it                    pure
    chain_of   whose work the oldest group lacks, by what the store says      pure
    Stalls     looks now and then whether the present step takes far longer than those before it, and reports which
               actors wait for which, with their stacks

A warning says that something is broken or wasted; a hint, that it could be faster. Deadlines end a run that hangs for
good; `Stalls` says earlier where it hangs, and ends nothing.
"""

import asyncio
import copy
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.conf.errors import PenstockError
from penstock.orchestrator.observability.charts.known_curves import KnownCurves
from penstock.orchestrator.observability.charts.themes import policies_in
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.run_directory.run_directory import RunDirectory

WARNING, HINT = "warning", "hint"


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str
    """A sentence on what was measured, with its numbers."""
    advice: str
    level: str = WARNING


class History:
    """The metrics of a run's first steps and of its last ones: rules look at no others, so that a long run's memory
    stays bounded."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._first: dict[str, list[float]] = {}
        """Values of the first steps, by metric."""
        self._last: deque[Mapping[str, Any]] = deque(maxlen=window + 1)
        self._num_steps = 0
        self._policy = ""
        self._looks: dict[str, deque[tuple[int, Mapping[str, Any]]]] = {}
        """The last steps with a look at an engine, by its name."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of the next step."""
        for key in metrics:
            known = self._first.setdefault(key, [])
            if len(known) < self.window:
                known += _values([metrics], key)
        self._last.append(metrics)
        self._num_steps += 1
        for name in {key.rpartition("/")[2] for key in metrics if key.startswith((SCORES, SAMPLES))}:
            self._looks.setdefault(name, deque(maxlen=self.window)).append((self._num_steps, metrics))

    def last(self, key: str) -> list[float]:
        """Values of a metric in those of the last steps that have it."""
        return _values(list(self._last)[-self.window :], self._own(key))

    def first(self, key: str) -> list[float]:
        """Values of a metric in the first steps that have it: as many as `last` at least."""
        return self._first.get(self._own(key), [])

    def of_policies(self) -> dict[str, "History"]:
        """The history of each policy by name, where several are trained: the same, with its own update and reward in
        the place of the policy's."""
        found = {}
        for name in policies_in(self._last[-1] if self._last else ()):
            found[name] = own = copy.copy(self)
            own._policy = name
        return found

    def _own(self, key: str) -> str:
        is_own = self._policy and key.startswith(("actor/", "reward/"))
        return f"{self._policy}/{key.removeprefix('actor/')}" if is_own else key

    def increase(self, key: str) -> float:
        """Increase of a counter within the window, for counters that only grow. 0 where it was reset."""
        newest = next(_each(reversed(self._last), key), None)
        if newest is None:
            return 0.0
        return max(0.0, newest - (next(_each(self._last, key)) if len(self._last) > self.window else 0.0))

    def is_throughout(self, key: str) -> bool:
        """Return whether all of the last steps have a metric."""
        return self.is_long_enough and all(line.get(key) is not None for line in list(self._last)[-self.window :])

    def looks(self, prefix: str) -> dict[str, list[float]]:
        """Values in the last looks at each engine, by its name: an engine of many gets its turn in few of the steps.
        Looks of more than `LOOKS_KEPT` windows ago, as those at an engine that has left, are forgotten."""
        since = self._num_steps - LOOKS_KEPT * self.window
        steps = {name: [line for step, line in looks if step > since] for name, looks in self._looks.items()}
        values = {name: _values(lines, prefix + name) for name, lines in steps.items()}
        return {name: each for name, each in values.items() if each}

    def named(self, prefix: str) -> list[str]:
        return [key for key in self._last[-1] if key.startswith(prefix)] if self._last else []

    @property
    def is_long_enough(self) -> bool:
        return len(self._last) >= self.window


Rule = Callable[[History, DiagnosisConfig, int], Finding | None]
"""A rule; its last argument is `max_staleness`."""


def _values(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return list(_each(lines, key))


def _each(lines: Iterable[Mapping[str, Any]], key: str) -> Iterator[float]:
    for line in lines:
        value = line.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield float(value)


SAME = 1e-9
"""Largest difference of rewards that count as the same."""
FILTERED = "no_signal"
OF_THE_TASK = (FILTERED, "prompt_too_long", "held_out", "no_answer", "silent")
"""Reasons of drops that are no fault: an algorithm's filter, rows that were never meant to be trained on, and those of
policies that sampled nothing."""
ENGINE = "rollout/groups/Rollout-"
"""Prefix of the metrics of what each engine has sampled. Where environments play, they lease the groups, and engines
only answer."""
SCORES, SAMPLES, TEMPERATURE, DOUBLED = "probe/scores/", "probe/samples/", "probe/temperature/", "probe/doubled/"
"""Prefixes of what probes have found out of each engine (`control/engine_probe.py`)."""
LEAST_LOOKS, LOOKS_KEPT = 2, 10
"""Least number of looks at an engine, and of estimates of its temperature; windows of steps for which they are kept."""
OTHER_TEMPERATURE, SPREADS = 0.005, 3.0
"""Difference of an engine's temperature that counts, as a share of it, and its least ratio to the spread of the
estimates."""
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
    found = _other_samples(history, config) or _other_scores(history, config)
    return found or _all_differ(history, config)


def _other_samples(history: History, config: DiagnosisConfig) -> Finding | None:
    """What an engine's own samples say: it scores them otherwise than it has recorded them."""
    means = {name: looks for name, looks in history.looks(SAMPLES).items() if len(looks) >= LEAST_LOOKS}
    factors = _other_temperatures(history, means)
    if factors:
        texts = ", ".join(f"{name} samples as if at {factor:.4g} times" for name, factor in factors.items())
        return Finding(
            "mismatch",
            f"{texts} the temperature that it is asked for: its samples differ from its own scores of them by "
            f"|Δ log p| {_mean_of(means, [*factors]):.2g} a token{_of_others(means, [*factors])}",
            "See rollout.engine_options for what changes its logits or its temperature.",
        )
    flags = history.looks(DOUBLED)
    doubled = [name for name in sorted(means) if 3 * len(flags.get(name, ())) >= max(6, len(means[name]))]
    wrong = doubled or _engines_beyond(means, config)
    if not wrong:
        return None
    text = (
        f"{', '.join(wrong)}: samples differ from the engine's own scores of them, under the same weights, by "
        f"|Δ log p| {_mean_of(means, wrong):.2g} a token{_of_others(means, wrong)}"
    )
    if doubled:
        return Finding(
            "mismatch",
            f"{text}, from a token on that repeats the one before it: it was written twice",
            "See rollout.engine_options for what changes tokens after they are sampled, such as a speculative_config.",
        )
    return Finding(
        "mismatch",
        f"{text}: it has read stale keys and values (a cache that was not emptied at a load), or what it recorded is "
        "of other tokens",
        "Compare with rollout.engine_options.enable_prefix_caching=false. On a CPU, with a large vocabulary, it may be "
        "the temperature as well.",
    )


def _other_temperatures(history: History, means: Mapping[str, Any]) -> dict[str, float]:
    """The temperature of engines that sample at another one, as a multiple of it."""
    fits = {name: each for name, each in sorted(history.looks(TEMPERATURE).items()) if len(each) >= LEAST_LOOKS}
    return {
        name: statistics.fmean(each)
        for name, each in fits.items()
        if name in means and abs(statistics.fmean(each) - 1) > max(OTHER_TEMPERATURE, SPREADS * statistics.pstdev(each))
    }


def _other_scores(history: History, config: DiagnosisConfig) -> Finding | None:
    """What an engine makes of rows that the trainer has scored under the same weights."""
    means = {name: looks for name, looks in history.looks(SCORES).items() if len(looks) >= LEAST_LOOKS}
    wrong = _engines_beyond(means, config)
    if not wrong:
        return None
    text = (
        f"{', '.join(wrong)} and the trainer score the same rows under the same weights with |Δ log p| "
        f"{_mean_of(means, wrong):.2g} a token{_of_others(means, wrong)}"
    )
    before = max(history.first(SCORES + name)[0] for name in wrong)
    if before <= config.largest_mismatch(is_exact=False):
        return Finding(
            "mismatch",
            f"{text}; they agreed at first ({before:.1g}): since then not all that it serves is of the version that it "
            "was sent",
            "Compare with another weights.transport, and without quantization in rollout.engine_options.",
        )
    return Finding(
        "mismatch",
        f"{text}, from the first look on: another dtype or kernel",
        "Compare rollout.dtype and rollout.engine_options with the trainer's dtype.",
    )


def _engines_beyond(means: Mapping[str, Sequence[float]], config: DiagnosisConfig) -> list[str]:
    limit = config.largest_mismatch(is_exact=False)
    return sorted(name for name, looks in means.items() if statistics.fmean(looks) > limit)


def _mean_of(means: Mapping[str, Sequence[float]], names: Sequence[str]) -> float:
    return statistics.fmean(statistics.fmean(means[name]) for name in names)


def _of_others(means: Mapping[str, Sequence[float]], wrong: Sequence[str]) -> str:
    """What the other engines differ by."""
    others = [name for name in means if name not in wrong]
    return f" ({_mean_of(means, others):.2g} at the other engines)" if others else ""


def _all_differ(history: History, config: DiagnosisConfig) -> Finding | None:
    """What differs over all engines, or has grown."""
    advice = "Compare rollout.dtype with the trainer's; algorithm.correction weighs tokens by the difference."
    for key in ("mismatch/logprob_abs_mean", "probe/engine_max"):  # of what was sampled; of what engines score again
        now, first = history.last(key), history.first(key)
        if len(now) < history.window:
            continue
        mean, before = statistics.fmean(now), statistics.fmean(first)
        if mean > config.largest_mismatch(is_exact=False):
            return Finding("mismatch", f"trainer and engine differ by |Δ log p| {mean:.2g} a token", advice)
        if mean > max(1e-3, config.mismatch_growth * before):
            text = f"|Δ log p| between trainer and engine grew from {before:.1g} to {mean:.1g}"
            return Finding("mismatch", text, advice)
    return None


def other_distribution(history: History, config: DiagnosisConfig, max_staleness: int) -> Finding | None:
    counts = {kind: sum(history.last(f"environment/turns_{kind}")) for kind in ("greedy", "structured", "narrowed")}
    turns = sum(history.last("environment/turns"))
    if not turns or not any(counts.values()):
        return None
    listed = ", ".join(f"{count:g} {kind}" for kind, count in counts.items() if count)
    return Finding(
        "other_distribution",
        f"of {turns:g} turns some were not sampled from what the trainer computes at any temperature: {listed}",
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
    listed = ", ".join(f"{reason} {count:g}" for reason, count in sorted(lost.items(), key=lambda item: -item[1]))
    return Finding(
        "dropped",
        f"{sum(lost.values()) / every:.0%} of the samples of the last {history.window} steps were dropped: {listed}",
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
OF_A_POLICY = (gradients, entropy, far_from_reference, padding)
"""Rules for each of several policies by itself."""


def findings(history: History, config: DiagnosisConfig, max_staleness: int) -> list[Finding]:
    """Findings of all rules."""
    if not history.is_long_enough:
        return []
    found = [found for rule in RULES if (found := rule(history, config, max_staleness)) is not None]
    for name, own in history.of_policies().items():
        each = [one for rule in OF_A_POLICY if (one := rule(own, config, max_staleness)) is not None]
        found += [replace(one, rule=f"{one.rule}/{name}", text=f"{name}: {one.text}") for one in each]
    return found


ACCURACY = "accuracy/heldout"
LEAST_MARGIN = 0.05
"""Accuracy below the worst of a recipe's seeds that is no chance."""
LOOK_S = 1.0
MOST_STACKS = 8
"""Most members whose stacks are read for one stall."""
TWICE = 2.0
"""Least multiple of the longest step so far that counts as a stall: some steps have an evaluation or a checkpoint."""
Describe = Callable[[], Awaitable[Mapping[str, Any]]]
Stacks = Callable[[Sequence[str]], Awaitable[Sequence[str]]]


class Diagnosis:
    """Lifecycle: `look` with each step's metrics. A finding is told when it appears, and again only after it was gone
    for a whole window."""

    def __init__(
        self,
        config: DiagnosisConfig,
        max_staleness: int,
        directory: RunDirectory,
        progress: ProgressDisplay,
        known: KnownCurves | None = None,
    ) -> None:
        """`known`: curves that the recipe is known to have; None: that is not known, or the settings are others."""
        self._known = known
        self._config, self._max_staleness = config, max_staleness
        self._directory, self._progress = directory, progress
        self._history = History(config.window)
        self._told: dict[str, int] = {}
        """The step at which each rule last found something, by rule."""

    def look(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Look at a step's metrics. Returns new findings."""
        if not self._config.enabled:
            return []
        self._history.add(metrics)
        new = []
        differs = below_band(self._known, step, metrics) if self._known is not None else None
        rules = findings(self._history, self._config, self._max_staleness)
        for found in (*rules, *([differs] if differs is not None else ())):
            before = self._told.get(found.rule)
            self._told[found.rule] = step
            if before is None or step - before > self._config.window:
                new.append(found)
                self._tell(step, found)
        return new

    def _tell(self, step: int, found: Finding) -> None:
        about = {"rule": found.rule, "text": found.text, "advice": found.advice}
        self._directory.event(found.level, step=step, **about)
        self._progress.warn(found.level, found.text, found.advice)


def below_band(known: KnownCurves, step: int, metrics: Mapping[str, Any]) -> Finding | None:
    """What there is to say of a run of a recipe's own settings whose held-out accuracy is below that of its seeds."""
    curve, value = known.curves.get(ACCURACY), metrics.get(ACCURACY)
    if curve is None or value is None or step not in curve.steps:
        return None
    at = curve.steps.index(step)
    low, high = curve.low[at], curve.high[at]
    if value >= low - max(LEAST_MARGIN, high - low):
        return None
    return Finding(
        "below_band",
        f"held-out accuracy is {value:.1%}, and with the recipe's {len(known.seeds)} seeds {low:.1%} to {high:.1%}",
        "The settings are the recipe's: look for what else differs, such as versions of packages, the model, the data, "
        f"or the CPU (theirs: {known.cpu}).",
    )


class Pace:
    """The usual duration of a run's steps."""

    def __init__(self, config: DiagnosisConfig) -> None:
        self._config = config
        self._last: deque[float] = deque(maxlen=config.window)
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self._longest = max(self._longest, seconds)

    @property
    def limit_s(self) -> float | None:
        """Seconds after which a step counts as stalled. None: there were too few steps to tell."""
        if len(self._last) < self._config.window:
            return None
        usual = self._config.stall_factor * statistics.median(self._last)
        return max(usual, TWICE * self._longest, self._config.stall_least_s)


@dataclass(frozen=True)
class Chain:
    """A chain of waits."""

    text: str
    members: tuple[str, ...] = ()
    """Members whose turn it is."""


def chain_of(described: Mapping[str, Any], writers: Mapping[str, str], ranks: Sequence[str]) -> Chain:
    """The chain of waits of the oldest group. `described`: what `StoreClient.describe` says. `writers`: the stage that
    writes each column, by column, in the order of the dataflow. `ranks`: the trainer's, whose turn it is where nothing
    is lacking."""
    group, lacking = described.get("oldest_group"), described.get("oldest_group_waits_for") or {}
    column = next((name for name in writers if name in lacking), None)
    if group is None or column is None:
        return Chain(f"no group waits for anything: it is the turn of {', '.join(ranks)}", tuple(ranks))
    stage = writers[column]
    leases = [lease for lease in described.get("leases", ()) if lease["stage"] == stage]
    owners = tuple(dict.fromkeys(str(lease["owner"]) for lease in leases))
    missing = f"the oldest group, {group}, lacks {column} of {lacking[column]} row(s), which {stage} writes"
    if owners:
        rows = sum(int(lease["open_rows"]) for lease in leases)
        return Chain(f"{missing}: {rows} row(s) of that stage are under way with {', '.join(owners)}", owners)
    idle = tuple(map(str, (described.get("waiters") or {}).get(stage) or ()))
    states = (described.get("rows") or {}).get(stage) or {}
    if states.get("free"):
        return Chain(f"{missing}: nobody has taken its {states['free']} row(s) that are ready", idle)
    return Chain(f"{missing}, and nobody has it under way", idle)


class Stalls:
    """Lifecycle: `finished` after each step, `run` until it is cancelled."""

    def __init__(
        self,
        config: DiagnosisConfig,
        describe: Describe,
        stacks: Stacks,
        writers: Mapping[str, str],
        ranks: Callable[[], Sequence[str]],
        directory: RunDirectory,
        progress: ProgressDisplay,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stacks`: writes the stacks of members and returns the files' names. `ranks`: returns the trainer's present
        ones."""
        self._config, self._describe, self._stacks = config, describe, stacks
        self._writers, self._ranks = writers, ranks
        self._directory, self._progress, self._clock = directory, progress, clock
        self._pace = Pace(config)
        self._step, self._since, self._is_told = 0, clock(), False

    def finished(self, step: int, seconds: float | None) -> None:
        """Note that a step is over. `seconds`: its duration; None: not known."""
        if seconds is not None:
            self._pace.add(seconds)
        self._step, self._since, self._is_told = step, self._clock(), False

    async def run(self) -> None:
        while self._config.enabled:
            await asyncio.sleep(LOOK_S)
            limit_s = self._pace.limit_s
            waited_s = self._clock() - self._since
            if limit_s is not None and waited_s > limit_s and not self._is_told:
                self._is_told = True
                await self._tell(waited_s)

    async def _tell(self, waited_s: float) -> None:
        step = self._step + 1
        try:
            chain = chain_of(await self._describe(), self._writers, self._ranks())
        except PenstockError as error:
            chain = Chain(f"the store does not say who waits for whom: {error}")
        files = list(await self._stacks(chain.members[:MOST_STACKS]))
        text = f"step {step} has taken {waited_s:.0f} s so far: {chain.text}"
        advice = (
            f"What they are at: {', '.join(files)} in the run's directory." if files else "`penstock status` says more."
        )
        about = {"rule": "stall", "text": text, "advice": advice}
        self._directory.event("warning", step=step, **about, members=list(chain.members), stacks=files)
        self._progress.warn("warning", text, advice)
