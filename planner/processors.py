"""Seconds of a run on CPUs, whose engines and ranks share the cores of one machine, and their costs from the records of
another run.

    alone      what is done takes a number of processor seconds, and T threads share the part of it that can be shared
    together   members ask for more cores than there are: all of them slow down in proportion

So the order of what happens is that of a machine with as many cores as are asked for, and time goes slower: the
simulator plays the run as if nobody were in the way, and counts each second as many times as cores are missing.

The costs come from a run, whatever its split was:

    spans.jsonl              when each group was sampled, each update, publication and load
    samples/step_N.parquet   how long each prompt and response is
    config.yaml              the split, whose threads are taken out again

The seconds of a decode step come of all groups at once, by least squares: a group takes as many steps as its longest
response has tokens, and the more sequences are decoded meanwhile, the longer each step is. Pure, but for `read_costs`.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from pyarrow import parquet

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.threads import read_trials, threads_per_worker
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.durations import SyncSeconds

ENGINE_GAINS: Mapping[int, float] = {1: 1.0, 2: 0.6}
"""Speedup of an engine by its number of threads, where no trial of the run says (`threads.json`): the hf
engine and a model of 3M parameters, whose threads sleep and wake for operations that are shorter than that."""
RANK_GAINS: Mapping[int, float] = {1: 1.0, 2: 1.04}
"""The same of a rank."""
RANK_ASKS = 0.7
"""Cores that a rank asks for in the mean for each thread beside its first. Those of such an engine ask for none."""
EXCHANGES = 12.0
"""Seconds in which two ranks exchange weights and gradients in an update, for each that a publication takes: both are
of all weights, through sockets instead of shared memory."""
OTHERS = 0.2
"""Processor seconds of store, rewards, driver and Ray, and what crowded caches cost, for each of engines and ranks."""
SETTLED = 2
"""First steps that are left out: warming up."""
ENGINE, RANK = "Rollout-", "Trainer-"
SPARE_S = 0.1
"""Longest pause of an engine between two groups that is the way of a lease, and no wait for prompts."""
Line = Mapping[str, Any]
Row = tuple[int, int, int]
"""Group, tokens of the prompt, tokens of the response."""


def gain(gains: Mapping[int, float], threads: int) -> float:
    """Speedup of `threads` threads over one: that of the largest known number up to it.

    >>> gain({1: 1.0, 2: 1.7}, 3)
    1.7
    """
    return gains[max((count for count in gains if count <= threads), default=min(gains))]


@dataclass(frozen=True)
class Cores:
    """Cores of a machine, and how many of them each member asks for while it works."""

    there: float
    engine: float
    rank: float
    others: float = OTHERS
    """Cores that all other processes ask for, for each that engines and ranks do."""

    def pace(self, num_engines: int, num_ranks: int) -> float:
        """Factor by which everything slows down while these engines and ranks work: at least 1."""
        asked = (num_engines * self.engine + num_ranks * self.rank) * (1 + self.others)
        return max(1.0, asked / self.there)


@dataclass(frozen=True)
class ProcessorCosts:
    """Seconds on one thread, with nobody in the way."""

    decode_s: float
    """Seconds of a decode step, whatever its sequences."""
    sequence_s: float
    """Seconds of a decode step for each of its sequences."""
    group_s: float
    """Seconds of a group, beside its decode steps: its lease, its prompt, its way back."""
    token_s: float
    """Seconds of an update by one rank, for each token."""
    update_s: float
    """Seconds of an update, whatever its tokens: the optimizer, the copy of the state."""
    published_s: float
    paused_s: float
    scored_s: float
    """From the end of a batch's last group until the update begins: rewards, advantages, the forming of the batch."""
    between_s: float
    """Seconds of a step between its phases, in which the controller's calls go around."""
    engine_gains: Mapping[int, float] = field(default_factory=lambda: ENGINE_GAINS)
    rank_gains: Mapping[int, float] = field(default_factory=lambda: RANK_GAINS)

    def scaled(self, factor: float) -> "ProcessorCosts":
        """The same with all seconds multiplied by `factor`."""
        seconds = {name: factor * value for name, value in vars(self).items() if name.endswith("_s")}
        return replace(self, **seconds)


NOTHING = ProcessorCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ProcessorDurations:
    """Durations of one split of a machine's cores; implements `Durations`."""

    costs: ProcessorCosts
    config: RunConfig
    num_cores: int
    prompt: int
    """Mean tokens of a prompt."""
    first_stage: str = "reward"
    """The stage after the rollout: a batch waits for it and all that follows."""

    def cores(self) -> Cores:
        """Cores that engines and ranks ask for, so that the simulator knows who is in whose way."""
        return Cores(self.num_cores, 1.0, 1 + RANK_ASKS * (self._threads("trainer") - 1))

    def prefill_s(self, tokens: int) -> float:
        return self.costs.group_s * tokens / self.prompt

    def decode_s(self, num_sequences: float, context: float) -> float:
        return (self.costs.decode_s + num_sequences * self.costs.sequence_s) / self.engine_gain

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        tokens = max(map(sum, lengths), default=0)
        return (self.costs.update_s + self.costs.token_s * tokens) / self.rank_gain + self.exchanged_s

    @property
    def exchanged_s(self) -> float:
        """Seconds of an update in which ranks exchange weights and gradients, by rings."""
        ranks = self.config.trainer.num_ranks
        return EXCHANGES * self.costs.published_s * 2 * (ranks - 1) / ranks

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return self.costs.scored_s if stage == self.first_stage else 0.0

    def sync(self) -> SyncSeconds:
        waited = self.costs.between_s + self.costs.published_s
        return SyncSeconds(waited, self.costs.paused_s, waited)

    def turn_s(self) -> float:
        return 0.0

    @property
    def engine_gain(self) -> float:
        return gain(self.costs.engine_gains, self._threads("rollout"))

    @property
    def rank_gain(self) -> float:
        return gain(self.costs.rank_gains, self._threads("trainer"))

    def _threads(self, role: str) -> int:
        config = self.config
        return threads_per_worker(role, config, self.num_cores, config.rollout.least_workers, config.trainer.num_ranks)


@dataclass(frozen=True)
class MemberSpan:
    """What a member did. Times in seconds since the epoch."""

    start: float
    end: float
    details: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class SampledGroup:
    """A group that an engine has sampled. Times in seconds since the epoch."""

    start: float
    end: float
    lengths: tuple[int, ...]
    """Tokens of its responses."""


def read_costs(directory: RunDirectory, split: ProcessorDurations) -> ProcessorCosts:
    """The costs of a run. `split`: its own, of any costs. Raises `ValueError` where too little is recorded."""
    for node, trial in read_trials(directory).items():
        if node.cores == split.num_cores:
            gains = [{count: each[min(each)] / seconds for count, seconds in each.items()}
                     for each in (trial.engine_s, trial.rank_s)]  # fmt: skip
            split = replace(split, costs=replace(split.costs, engine_gains=gains[0], rank_gains=gains[1]))
    rows: dict[int, list[Row]] = {}
    for file in directory.sample_files():
        table = parquet.read_table(file, columns=["group_id", "prompt_ids", "response_ids"]).to_pydict()
        lengths = (map(len, table[name]) for name in ("prompt_ids", "response_ids"))
        rows[int(file.stem.rpartition("_")[2])] = list(zip(table["group_id"], *lengths, strict=True))
    lines = [line for line in directory.read_spans() if line.get("step", 0) > SETTLED]
    return fit_costs(lines, rows, split)


def fit_costs(lines: Sequence[Line], rows: Mapping[int, Sequence[Row]], split: ProcessorDurations) -> ProcessorCosts:
    """The costs of a run. `lines`: of its `spans.jsonl`; `rows`: what each step has trained. Raises `ValueError` where
    that is too little."""
    config, engines = split.config, list(sampled_groups(lines, rows))
    updates = [
        (span, rows[line["step"]])
        for line in lines
        if line["step"] in rows
        for span in _spans(line, RANK, "update")
    ]  # fmt: skip
    if not updates or sum(map(len, engines)) < 3:
        raise ValueError("too few steps are recorded with their samples")
    one_at_a_time = config.rollout.max_concurrent_samples < 2 * config.algorithm.group_size
    decode_s, sequence_s, group_s = fit_decoding(engines, one_at_a_time)
    tokens = sum(prompt + response for _, own in updates for _, prompt, response in own) / config.trainer.num_ranks
    passes = [span.details.get("forward", 0.0) + span.details.get("backward", 0.0) for span, _ in updates]
    rests = [span.seconds - own for (span, _), own in zip(updates, passes, strict=True)]
    handed, begun, scored = _between(lines)
    published_s = _median_of(lines, RANK, "publish")
    exchanged_s = replace(split, costs=replace(split.costs, published_s=published_s)).exchanged_s
    computed_s = max(0.0, sum(passes) - len(passes) * exchanged_s)
    engine, rank = split.engine_gain, split.rank_gain
    return replace(
        split.costs, decode_s=decode_s * engine, sequence_s=sequence_s * engine, group_s=group_s,
        token_s=computed_s / tokens * rank, update_s=median(rests) * rank, published_s=published_s,
        paused_s=_median_of(lines, ENGINE, "load weights"), scored_s=scored, between_s=handed + begun,
    )  # fmt: skip


def sampled_groups(lines: Sequence[Line], rows: Mapping[int, Sequence[Row]]) -> Iterator[list[SampledGroup]]:
    """The groups of each engine whose lengths are known, in the order of their ends."""
    lengths: dict[int, list[int]] = defaultdict(list)
    for trained in rows.values():
        for group, _, response in trained:
            lengths[group].append(response)
    by_engine: dict[str, list[SampledGroup]] = defaultdict(list)
    for line in lines:
        for lane in line["lanes"]:
            for span in _spans(line, lane, "rollout"):
                if span.details["groups"] == 1 and (own := lengths.get(span.details["group"])):
                    by_engine[lane].append(SampledGroup(span.start, span.end, tuple(own)))
    for groups in by_engine.values():
        yield sorted(groups, key=lambda group: group.end)


def fit_decoding(engines: Sequence[Sequence[SampledGroup]], one_at_a_time: bool) -> tuple[float, float, float]:
    """Seconds of a decode step, more for each of its sequences, and more for each group. `engines`: the groups of each
    engine. `one_at_a_time`: it samples a group once the one before is over."""
    facts, seconds, gaps = list[list[float]](), list[float](), [0.0]
    for groups in engines:
        if one_at_a_time:
            gaps += [gap for one, after in pairwise(groups) if 0 <= (gap := after.start - one.end) < SPARE_S]
        begun = _first_steps(groups)
        for group, first in zip(groups, begun, strict=True):
            last = first + max(group.lengths)
            others = [(group, first)] if one_at_a_time else zip(groups, begun, strict=True)
            tokens = [max(0.0, min(last, at + length) - max(first, at)) for one, at in others for length in one.lengths]
            facts.append([last - first, sum(tokens), 1.0])
            seconds.append(group.end - group.start)
    decode, sequence, group_s = _not_negative(np.array(facts), np.array(seconds))
    return decode, sequence, group_s + median(gaps)


def _first_steps(groups: Sequence[SampledGroup]) -> list[float]:
    """Number of the engine's step that makes the first tokens of each group. All sequences of an engine make a token a
    step, so that steps are known where groups end; in between they are taken as even."""
    times, steps, found = list[float](), list[float](), dict[int, float]()
    for index in sorted(range(len(groups)), key=lambda index: groups[index].start):
        group = groups[index]
        first = found[index] = float(np.interp(group.start, times, steps)) if times else 0.0
        for time, step in ((group.start, first), (group.end, first + max(group.lengths))):
            at = bisect(times, time)
            times.insert(at, time)
            steps.insert(at, step)
    return [found[index] for index in range(len(groups))]


def _not_negative(facts: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Least squares with factors of at least 0: those that would be below are left out, the least first."""
    left = list(range(facts.shape[1]))
    while left:
        found = np.linalg.lstsq(facts[:, left], seconds, rcond=None)[0]
        if found.min() >= 0:
            break
        del left[int(found.argmin())]
    values = dict(zip(left, found.tolist(), strict=True)) if left else {}
    return [values.get(index, 0.0) for index in range(facts.shape[1])]


def _between(lines: Sequence[Line]) -> tuple[float, float, float]:
    """Seconds from the end of an update until its publication begins, from the last load until engines begin with what
    is next, and from the last group of a batch until its update. Medians; none of a kind is none."""
    handed, begun, scored, loaded = list[float](), list[float](), list[float](), None
    for line in lines:
        groups, updates = _spans(line, ENGINE, "rollout"), _spans(line, RANK, "update")
        published, loads = _spans(line, RANK, "publish"), _spans(line, ENGINE, "load weights")
        if groups and updates:
            first, last = min(one.start for one in groups), max(one.end for one in groups)
            update = max(one.start for one in updates)
            if loaded is not None and first >= loaded:
                begun.append(first - loaded)
            if update >= last:
                scored.append(update - last)
            if published:
                handed.append(min(one.start for one in published) - max(one.end for one in updates))
        loaded = max((one.end for one in loads), default=None)
    return tuple(max(0.0, median(found)) if found else 0.0 for found in (handed, begun, scored))  # type: ignore[return-value]


def _spans(line: Line, lanes: str, name: str) -> list[MemberSpan]:
    """Spans of a name in the lanes whose names begin so."""
    at = line["start"]
    return [
        MemberSpan(at + start / 1000, at + end / 1000, details)
        for lane, spans in line["lanes"].items()
        if lane.startswith(lanes)
        for what, start, end, details in spans
        if what == name
    ]  # fmt: skip


def _median_of(lines: Sequence[Line], lanes: str, name: str) -> float:
    seconds = [span.seconds for line in lines for span in _spans(line, lanes, name)]
    return median(seconds) if seconds else 0.0
