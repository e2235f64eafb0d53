"""Seconds of a step by a closed form: what each side could do alone, and how the bound on staleness joins them.

    synchronous   a batch is generated, scored, trained and published, one after the other
    k steps off   the longest of
                      update and what of the publication it waits for
                      generation, with as many sequences under way as k batches have, and an engine's pause
                      a batch's way from its first token to its version, divided by the k + 1 batches that are on it

Engines stay full across steps where the bound lets them: a model in which each step makes one batch from nothing is
wrong by 165% eight steps off (docs/planning.md). The simulator plays the run itself; this chooses what it plays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from penstock.orchestrator.planning.durations import Durations, Sync
from penstock.orchestrator.planning.lengths import POINTS, Lengths

CLASSES = 24
"""Lengths that stand for those of one engine's share of a batch, besides the longest."""


@dataclass(frozen=True)
class Engines:
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
    stages: tuple[str, ...] = ()
    """Stages between rollout and training, by name, each with `actors`."""
    actors: int = 1
    """Actors of each such stage."""

    @property
    def num_rows(self) -> int:
        return self.groups * self.group_size

    @property
    def row_tokens(self) -> float:
        """Mean tokens of a row, its prompt included."""
        return self.lengths.prompt + self.lengths.mean


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
    """What decides: `generation`, `training`, `staleness`, or `turns` where all wait for each other."""
    tokens_per_s: float
    """Response tokens that are trained a second."""

    @property
    def engines_idle(self) -> float:
        """Share of the step in which engines have nothing to do."""
        return max(0.0, 1 - self.rollout_s / self.step_s)

    @property
    def ranks_idle(self) -> float:
        """Share of the step in which ranks wait."""
        return max(0.0, 1 - self.update_s / self.step_s)


def estimate(engines: Sequence[Engines], ranks: Durations, work: Workload) -> Estimate:
    """Seconds of a step. `ranks`: durations of updates, stages and weights."""
    update = ranks.update_s([_rows_of_share(work)])
    others = sum(_stage_s(ranks, stage, work) for stage in work.stages)
    sync = ranks.sync()
    paused = max(one.durations.sync().paused_s for one in engines)
    turns = 2 * ranks.turn_s() if work.is_colocated else 0.0
    tokens = work.num_rows * work.lengths.mean
    if work.max_staleness == 0 or work.is_colocated:
        rollout = _batch_s(engines, work)
        waited = sync.published_s + paused
        step = rollout + others + update + waited + turns
        return Estimate(step, rollout, update, others, waited, turns, "turns", tokens / step)
    tighter = [replace(work, max_staleness=number) for number in range(1, work.max_staleness + 1)]
    ways = [_apart(engines, one, update, others, sync, paused) for one in tighter]
    return min(ways, key=lambda way: way.step_s)  # a run may stay below its bound


def _apart(
    engines: Sequence[Engines], work: Workload, update: float, others: float, sync: Sync, paused: float
) -> Estimate:
    """Seconds of a step where engines and ranks work at the same time."""
    rollout = _full_s(engines, work) + paused
    latency = _latency_s(engines, work) + others + update + sync.published_s + paused
    limits = {
        "generation": rollout,
        "training": update + sync.critical_s,
        "staleness": latency / (work.max_staleness + 1),
    }
    limit, step = max(limits.items(), key=lambda item: item[1])
    tokens = work.num_rows * work.lengths.mean
    return Estimate(step, rollout, update, others, sync.critical_s, 0.0, limit, tokens / step)


# Generation.


def _batch_s(engines: Sequence[Engines], work: Workload) -> float:
    """Seconds from a batch's first token to its last, with nothing else under way."""
    return max(_drained_s(one, work, rows) for one, rows in _split(engines, work))


def _full_s(engines: Sequence[Engines], work: Workload) -> float:
    """Seconds of a batch's tokens at the rate of engines that stay full."""
    rate = sum(one.count * _rate(one, work, _under_way(engines, work, one)) for one in engines)
    return work.num_rows / rate


def _latency_s(engines: Sequence[Engines], work: Workload) -> float:
    """Seconds of a batch's longest sequence, among others that are under way."""
    longest, context = work.lengths.sample(min(work.num_rows, POINTS))[-1], work.lengths.mean_context
    return max(longest * one.durations.decode_s(max(1.0, _under_way(engines, work, one)), context) for one in engines)


def _under_way(engines: Sequence[Engines], work: Workload, one: Engines) -> float:
    """Sequences that an engine decodes at a time, in the mean: one batch is with the trainer, the others are here."""
    return min(one.slots, work.max_staleness * work.num_rows / sum(each.count for each in engines))


def _rate(one: Engines, work: Workload, sequences: float) -> float:
    """Sequences a second of one engine that decodes so many in the mean: with less than one it is idle at times."""
    step = one.durations.decode_s(max(1.0, sequences), work.lengths.mean_context)
    prefill = one.durations.prefill_s(work.lengths.prompt) / work.group_size
    return sequences / (work.lengths.mean * step + sequences * prefill)


def _split(engines: Sequence[Engines], work: Workload) -> list[tuple[Engines, float]]:
    """Engines, and the rows that one of each kind gets: engines take groups as they are free."""
    share = work.num_rows / sum(one.count for one in engines)
    rates = [_rate(one, work, min(one.slots, share)) for one in engines]
    whole = sum(rate * one.count for rate, one in zip(rates, engines, strict=True))
    return [(one, work.num_rows * rate / whole) for rate, one in zip(rates, engines, strict=True)]


def _drained_s(one: Engines, work: Workload, rows: float) -> float:
    """Seconds in which one engine makes so many rows, with nothing after them."""
    lengths = work.lengths
    prefill = rows / work.group_size * one.durations.prefill_s(lengths.prompt)
    if rows <= one.slots:
        longest = lengths.sample(min(work.num_rows, POINTS))[-1]  # some engine has the batch's
        own = [*(min(length, longest) for length in lengths.sample(CLASSES)), longest]
        return prefill + _decoded_s(one.durations, own, max(0.0, rows - 1), lengths.prompt)
    step = one.durations.decode_s(one.slots, lengths.mean_context)
    left = lengths.residuals
    full = (rows * lengths.mean - one.slots * sum(left) / len(left)) / one.slots * step
    before = lengths.prompt + lengths.mean / 2
    return prefill + full + _decoded_s(one.durations, left, one.slots - 1, before)


def _decoded_s(durations: Durations, lengths: Sequence[int], others: float, before: float) -> float:
    """Seconds until the last of these has ended. `lengths`: ascending. The last one stands for one row, each of the
    rest for an equal part of the `others`, which need not be a whole number; `before`: tokens that each has at the
    start."""
    seconds, last, each = 0.0, 0, others / (len(lengths) - 1)
    for index, length in enumerate(lengths):
        if length > last:
            there = 1 + (len(lengths) - 1 - index) * each
            seconds += (length - last) * durations.decode_s(there, before + (last + length) / 2)
        last = length
    return seconds


# The others.


def _rows_of_share(work: Workload) -> tuple[int, ...]:
    return _rows(work.lengths, max(1, -(-work.num_rows // work.num_shares)))


@lru_cache(maxsize=256)
def _rows(lengths: Lengths, count: int) -> tuple[int, ...]:
    return tuple(lengths.prompt + length for length in lengths.sample(count))


def _stage_s(durations: Durations, stage: str, work: Workload) -> float:
    """Seconds that a batch waits for a stage that goes on beside generation: its share of the last groups."""
    rows = max(1, round(work.num_rows / work.actors / work.groups))
    return durations.stage_s(stage, rows, round(rows * work.row_tokens))
