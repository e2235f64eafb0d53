"""Seconds of a step by a closed form: what each side could do alone, and how the bound on staleness joins them.

    synchronous   a batch is generated, scored, trained and published, one after the other
    k steps off   the longest of
                      update and what of the publication it waits for
                      a version's publication and load: versions come one after the other
                      generation, with as many sequences under way as there are places, and an engine's pause
                      all rows of a batch by the actors of a stage
                      a batch's way from its first token to its version, divided by the k + 1 batches that are on it

Attempts that wait between turns are under way and are not decoded (`lengths.py`); they keep their places.

Engines stay full across steps where the bound lets them: a model in which each step makes one batch from nothing is
wrong by 96% eight steps off (docs/planning.md). The simulator plays the run itself; this chooses what it plays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from penstock.planner.durations import Durations, SyncSeconds
from penstock.planner.lengths import POINTS, Lengths

CLASSES = 24
"""Lengths that stand for those of one engine's share of a batch, besides the longest."""
ROUNDS = 6
"""Times that the sequences under way and the seconds of a step are found from each other."""
GROUPS = 64
"""Most groups that stand for those of a batch."""


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one kind."""

    count: int
    durations: Durations
    slots: int
    """Sequences that one decodes at a time."""


@dataclass(frozen=True)
class Workload:
    """What a step asks for."""

    groups: int
    group_size: int
    lengths: Lengths
    num_shares: int
    """Shares of a batch that ranks train on side by side: ranks that split rows have one."""
    max_staleness: int = 0
    is_colocated: bool = False
    num_minibatches: int = 1
    """Optimizer steps of an update, in each of which ranks wait for the one with the most tokens."""
    stages: tuple[tuple[str, int], ...] = ()
    """Stages between rollout and training, by name, each with the number of its actors that get rows of their own."""

    @property
    def num_rows(self) -> int:
        return self.groups * self.group_size

    @property
    def row_tokens(self) -> float:
        """Mean tokens of a row, its prompt included."""
        return self.lengths.row_tokens(self.lengths.mean)


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, and what they consist of."""

    step_s: float
    rollout_s: float
    """Seconds for a batch if engines did nothing else: of the first to the last token where all wait for it, else at
    the rate of full engines."""
    update_s: float
    others_s: float
    """Seconds of rewards and scorers that a batch waits for."""
    sync_s: float
    """Seconds of the weight sync that a step waits for."""
    turns_s: float
    limit: str
    """What decides: `generation`, `training`, `weights`, `stages`, `staleness`, or `turns` where all wait for each
    other."""
    tokens_per_s: float
    """Response tokens that are trained a second."""
    busy_s: float
    """Seconds of a step in which engines have something to do: prompts come batch by batch, with each version."""

    @property
    def engines_idle(self) -> float:
        """Share of the step in which engines have nothing to do."""
        return max(0.0, 1 - self.rollout_s / self.step_s)

    @property
    def ranks_idle(self) -> float:
        """Share of the step in which ranks wait."""
        return max(0.0, 1 - self.update_s / self.step_s)


def estimate(engines: Sequence[EngineGroup], ranks: Durations, work: Workload) -> Estimate:
    """Seconds of a step. `ranks`: durations of updates, stages and weights."""
    update = ranks.update_s([_rows_of_share(work)])
    sync = ranks.sync()
    paused = max(one.durations.sync().paused_s for one in engines)
    turns = 2 * ranks.turn_s() if work.is_colocated else 0.0
    tokens = work.num_rows * work.lengths.mean
    if work.max_staleness == 0 or work.is_colocated:
        rollout = _batch_s(engines, work)
        others = _others_s(ranks, work, rollout)
        waited = sync.published_s + paused
        step = rollout + others + update + waited + turns
        return Estimate(step, rollout, update, others, waited, turns, "turns", tokens / step, rollout)
    tighter = [replace(work, max_staleness=number) for number in range(1, work.max_staleness + 1)]
    ways = [_apart(engines, ranks, one, update, sync, paused) for one in tighter]
    return min(ways, key=lambda way: way.step_s)  # a run may stay below its bound


def _apart(
    engines: Sequence[EngineGroup], ranks: Durations, work: Workload, update: float, sync: SyncSeconds, paused: float
) -> Estimate:
    """Seconds of a step where engines and ranks work at the same time."""
    most = [_most(one, engines, work) for one in engines]
    rollout = _full_s(engines, most, work)
    others = _others_s(ranks, work, _longest_s(engines, most, work))
    limits = {
        "generation": rollout + paused,
        "training": update + sync.critical_s,
        "weights": sync.published_s + paused,
        "stages": max((_stage_s(ranks, stage, actors, work) for stage, actors in work.stages), default=0.0),
    }
    under_way, step = most, 0.0
    for _ in range(ROUNDS):
        on_its_way = _longest_s(engines, under_way, work) + others + update + sync.published_s + paused
        limits["staleness"] = on_its_way / (work.max_staleness + 1)
        step = max(limits.values())
        under_way = [
            min(number, _rate(one, work, number) * rollout / step * _mean_s(one, before, work))
            for one, number, before in zip(engines, most, under_way, strict=True)
        ]  # Little's law: those that come in a second, for so long as each stays
    limit, tokens = max(limits, key=lambda name: limits[name]), work.num_rows * work.lengths.mean
    busy = min(step, _batch_s(engines, work) + paused)
    return Estimate(step, rollout + paused, update, others, sync.critical_s, 0.0, limit, tokens / step, busy)


# Generation.


def _batch_s(engines: Sequence[EngineGroup], work: Workload) -> float:
    """Seconds from a batch's first token to its last, with nothing else under way."""
    return max(_drained_s(one, work, rows) for one, rows in _split(engines, work))


def _full_s(engines: Sequence[EngineGroup], under_way: Sequence[float], work: Workload) -> float:
    """Seconds of a batch's tokens by engines that decode `under_way` sequences at a time."""
    rates = (one.count * _rate(one, work, number) for one, number in zip(engines, under_way, strict=True))
    return work.num_rows / sum(rates)


def _longest_s(engines: Sequence[EngineGroup], under_way: Sequence[float], work: Workload) -> float:
    """Seconds of a batch's longest sequence. `under_way`: sequences that each engine decodes at a time."""
    longest = work.lengths.longest(min(work.num_rows, POINTS))
    each = (_mean_s(one, number, work) for one, number in zip(engines, under_way, strict=True))
    return max(each) * longest / work.lengths.mean


def _mean_s(one: EngineGroup, under_way: float, work: Workload) -> float:
    """Seconds in which an engine decodes a sequence, among others, and those between its turns."""
    lengths, decoded = work.lengths, _decoding(one, under_way, work)
    return lengths.mean * one.durations.decode_s(max(1.0, decoded), lengths.mean_context) + lengths.waits_s


def _decoding(one: EngineGroup, under_way: float, work: Workload) -> float:
    """Sequences that an engine decodes at a time, of so many that are under way: the others are between turns."""
    lengths, decoded = work.lengths, under_way
    for _ in range(ROUNDS if lengths.waits_s else 0):
        seconds = lengths.mean * one.durations.decode_s(max(1.0, decoded), lengths.mean_context)
        decoded = under_way * seconds / (seconds + lengths.waits_s)
    return decoded


def _read_s(one: EngineGroup, work: Workload) -> float:
    """Seconds in which an engine reads one sequence's part of its group's prompt, and what is added between turns."""
    lengths, durations = work.lengths, one.durations
    later = durations.prefill_s(round(lengths.read)) if lengths.read else 0.0
    return durations.prefill_s(lengths.prompt) / work.group_size + later


def _most(one: EngineGroup, engines: Sequence[EngineGroup], work: Workload) -> float:
    """Most sequences that an engine decodes at a time, in the mean: all that the bound lets in, where it has room. A
    group has its places until the longest of its samples has ended."""
    longest = _longest(work.lengths, work.groups, work.group_size)
    filled = min(1.0, work.lengths.mean * len(longest) / sum(longest))
    return min(one.slots * filled, (work.max_staleness + 1) * work.num_rows / sum(each.count for each in engines))


def _rate(one: EngineGroup, work: Workload, sequences: float) -> float:
    """Sequences a second of one engine that has `sequences` under way: with less than one it is idle at times."""
    return sequences / (_mean_s(one, sequences, work) + sequences * _read_s(one, work))


def _split(engines: Sequence[EngineGroup], work: Workload) -> list[tuple[EngineGroup, float]]:
    """Engines, and the rows that one of each kind gets: engines take groups as they are free."""
    share = work.num_rows / sum(one.count for one in engines)
    rates = [_rate(one, work, min(one.slots, share)) for one in engines]
    whole = sum(rate * one.count for rate, one in zip(rates, engines, strict=True))
    return [(one, work.num_rows * rate / whole) for rate, one in zip(rates, engines, strict=True)]


def _drained_s(one: EngineGroup, work: Workload, rows: float) -> float:
    """Seconds in which one engine makes `rows` rows, with nothing after them."""
    lengths, read = work.lengths, rows * _read_s(one, work)
    if rows <= one.slots:
        longest = lengths.longest(min(work.num_rows, POINTS))  # some engine has the batch's
        own = [*(min(length, longest) for length in lengths.sample(CLASSES)), longest]
        return read + _last_s(one, own, rows, lengths.prompt, work)
    decoded, left = _decoding(one, one.slots, work), lengths.residuals
    step = one.durations.decode_s(decoded, lengths.mean_context)
    full = (rows * lengths.mean - one.slots * sum(left) / len(left)) / decoded * step
    return read + full + _last_s(one, left, one.slots, lengths.row_tokens(lengths.mean / 2), work)


def _last_s(one: EngineGroup, left: Sequence[int], rows: float, before: float, work: Workload) -> float:
    """Seconds until the last of an engine's rows has ended, its waits between turns included. `left`: tokens that
    sequences still have to make, which stand for those of all rows."""
    share = _decoding(one, rows, work) / rows
    decoded = _decoded_s(one.durations, left, share * max(0.0, rows - 1), before, work.lengths.growth)
    return decoded + work.lengths.waits_s * left[-1] / work.lengths.mean


def _decoded_s(durations: Durations, lengths: Sequence[int], others: float, before: float, growth: float) -> float:
    """Seconds until the last of these has ended. `lengths`: ascending. The last one stands for one row, each of the
    rest for an equal part of the `others`, which need not be a whole number; `before`: tokens that each has at the
    start; `growth`: tokens by which each grows with a token that it decodes."""
    seconds, last, each = 0.0, 0, others / (len(lengths) - 1)
    for index, length in enumerate(lengths):
        if length > last:
            there = 1 + (len(lengths) - 1 - index) * each
            seconds += (length - last) * durations.decode_s(there, before + growth * (last + length) / 2)
        last = length
    return seconds


# Updates and other stages.


def _rows_of_share(work: Workload) -> tuple[int, ...]:
    """Tokens of the rows of the slowest rank: of the mean, or of a mini-batch's longest row where that is more."""
    rows = work.num_rows / work.num_minibatches
    own = _rows(work.lengths, math.ceil(max(1.0, rows / work.num_shares)))
    longest = _rows(work.lengths, max(1, min(POINTS, round(rows))))[-1:]
    return (own if sum(own) >= longest[0] else longest) * work.num_minibatches


@lru_cache(maxsize=256)
def _rows(lengths: Lengths, count: int) -> tuple[int, ...]:
    return tuple(round(lengths.row_tokens(length)) for length in lengths.sample(count))


def _others_s(ranks: Durations, work: Workload, rollout: float) -> float:
    """Seconds that a batch waits for stages after its last token, which comes `rollout` after its first: for the last
    group, and for those before it that actors have not done by then."""
    ends, waited = _longest(work.lengths, work.groups, work.group_size), 0.0
    for stage, actors in work.stages:
        whole = _stage_s(ranks, stage, actors, work)
        left = (whole * (len(ends) - index) / len(ends) for index in range(len(ends)))
        waited += max(seconds - rollout * (1 - end / ends[-1]) for seconds, end in zip(left, ends, strict=True))
    return waited


def _stage_s(durations: Durations, stage: str, actors: int, work: Workload) -> float:
    """Seconds in which the actors of a stage do all rows of a batch."""
    rows = -(-work.num_rows // actors)
    return durations.stage_s(stage, rows, round(rows * work.row_tokens))


@lru_cache(maxsize=256)
def _longest(lengths: Lengths, groups: int, group_size: int) -> tuple[int, ...]:
    """Tokens of the longest sample of each group of a batch, ascending: a group ends with it."""
    count, last = min(groups, GROUPS), len(lengths.quantiles) - 1
    return tuple(lengths.quantiles[round(last * ((index + 0.5) / count) ** (1 / group_size))] for index in range(count))
