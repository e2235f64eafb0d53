"""Groups of ranks chosen for each micro-batch by the lengths of rows (`trainer.sequence_parallel_size=auto`; FlexSP,
2412.01523): long rows over many ranks, short ones alone, in one pass. Pure and deterministic, so that all ranks of a
block, which have the same rows, make the same plan.

    tokens and squares of rows, PassCosts ─▶ plan_passes ─▶ [[Group(2, rows), Group(1, rows), Group(1, rows)], …]

A pass is a forward and backward that all ranks make together, so it takes as long as its slowest group: FSDP2 gathers
weights and reduces gradients over all of them.

Legend: P ranks of a block, each one place; an item is a row, or rows that stay together.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Self

import numpy as np


class PassCost(NamedTuple):
    """Seconds of a pass, all its ranks together at work."""

    each: float
    """Seconds that every pass takes, however short."""
    token: float
    square: float
    """Seconds of attention for each token squared, by rows."""

    def at_least(self, alone: "PassCost", size: int) -> "PassCost":
        """The cost of a group of `size` ranks, or where that is more, what its ranks take `alone`."""
        return PassCost(
            max(self.each, alone.each), max(self.token, alone.token / size), max(self.square, alone.square / size)
        )


class Rates(NamedTuple):
    """Speeds from which costs are estimated."""

    flops: float
    """Floating-point operations a second."""
    exchange: float
    """Bytes a second that a rank sends to others."""
    layer_s: float
    """Seconds of a layer's calls, forward and backward."""
    exchange_s: float
    """Seconds of one exchange without bytes."""


RATES = {"cpu": Rates(50e9, 1e9, 4e-4, 1e-4), "cuda": Rates(400e12, 200e9, 5e-4, 3e-5)}
"""Rates by the kind of device: a core of a server with gloo, and an H100 with NVLink. Orders of magnitude suffice: of
each other they decide from which length on a row is split."""
EXCHANGED, EXCHANGES = 8, 8
"""Tensors as wide as all heads that a layer exchanges, and exchanges: q, k, v and the result, forward and backward."""


@dataclass(frozen=True)
class PassCosts:
    """Costs by the size of a group: how many ranks split the tokens of its rows.

    costs = PassCosts({1: PassCost(0.01, 1e-4, 1e-8), 2: PassCost(0.012, 6e-5, 5e-9)})
    costs.seconds(2, tokens=8192, squares=8192**2)
    """

    by_size: Mapping[int, PassCost]

    @classmethod
    def estimated(
        cls, sizes: Sequence[int], device: str, *, num_parameters: int, num_layers: int, width: int, element_bytes: int
    ) -> Self:
        """Costs by the numbers of a model and `RATES`: the same in every run. `width`: of all heads of a layer."""
        rates = RATES[device]
        token, square = 6 * num_parameters / rates.flops, 6 * num_layers * width / rates.flops
        sent = num_layers * EXCHANGED * width * element_bytes / rates.exchange
        return cls({
            size: PassCost(
                num_layers * (rates.layer_s + EXCHANGES * rates.exchange_s * (size > 1)),
                (token + sent * (size - 1) / size) / size,
                square / size,
            )
            for size in sizes
        })  # fmt: skip

    @property
    def sizes(self) -> list[int]:
        """Sizes that a group may have, ascending; powers of two."""
        return sorted(self.by_size)

    def seconds(self, size: int, tokens: float, squares: float) -> float:
        cost = self.by_size[size]
        return cost.each + cost.token * tokens + cost.square * squares


@dataclass(frozen=True)
class Group:
    """Neighbouring ranks and the items that they compute together in a pass; without items they have nothing to do."""

    size: int
    items: tuple[int, ...]


Pass = tuple[Group, ...]
"""The groups of all places, in their order; largest first, so that each begins at a multiple of its size."""


def group_at(groups: Pass, place: int) -> Group:
    """The group that a place belongs to.

    >>> group_at((Group(2, (0,)), Group(1, (1, 2)), Group(1, ())), 2)
    Group(size=1, items=(1, 2))
    """
    for group in groups:
        if place < group.size:
            return group
        place -= group.size
    raise IndexError(place)


def plan_passes(
    tokens: np.ndarray, squares: np.ndarray, num_places: int, max_tokens: int, costs: PassCosts
) -> list[Pass]:
    """Choose passes, their groups, and the items of each group: each item exactly once. `tokens`, `squares`: of each
    item, `[items]`. `num_places`: P, a multiple of the largest size.

    A group of `size` ranks has at most `size * max_tokens` tokens. An item with more than the largest group may have is
    alone in one. Of the plans with one partition of the ranks for all passes, and the one that chooses it for each, the
    one whose passes take the fewest seconds by `costs` counts.
    """
    items = sorted(zip((-tokens).tolist(), range(len(tokens)), squares.tolist(), strict=True))
    largest, longest = costs.sizes[-1], max(tokens, default=0)
    every = list(partitions(num_places, costs.sizes))[::-1]  # of equally fast ones, the smallest groups
    alike = [[one] for one in every if len(set(one)) == 1 and (longest <= one[0] * max_tokens or one[0] == largest)]
    plans = [_plan(items, choices, max_tokens, costs) for choices in ([every] if len(every) > 1 else []) + alike]
    return min(plans, key=lambda plan: plan[0])[1]


def partitions(num_places: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sizes of groups that together have all places, largest first.

    >>> list(partitions(4, [1, 2, 4]))
    [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
    """
    if not num_places:
        yield ()
    for size in sorted(sizes, reverse=True):
        if size <= num_places:
            for rest in partitions(num_places - size, [one for one in sizes if one <= size]):
                yield (size, *rest)


Item = tuple[int, int, float]
"""Its tokens, negative so that the longest is first, its number, and its square."""


def _plan(
    items: list[Item], choices: list[tuple[int, ...]], max_tokens: int, costs: PassCosts
) -> tuple[float, list[Pass]]:
    """Passes whose partitions are among `choices`, and their seconds: each pass is the one that does the most work a
    second, with the longest items that are left."""
    total, passes = 0.0, []
    while items:
        filled = (_fill(items, sizes, max_tokens, costs) for sizes in choices)
        _, seconds, groups = max(filled, key=lambda one: one[0])
        taken = {item for group in groups for item in group.items}
        items = [item for item in items if item[1] not in taken]
        total += seconds
        passes.append(groups)
    return total, passes


def _fill(items: list[Item], sizes: tuple[int, ...], max_tokens: int, costs: PassCosts) -> tuple[float, float, Pass]:
    """Fill one pass: each item goes to the group that then has the fewest seconds, as long as tokens fit. Returns its
    work a second, its seconds, and its groups, of as many items as do the most work a second. Work is the seconds that
    one rank would take for the items, without those of any pass."""
    lone, largest = costs.by_size[1], costs.sizes[-1]
    rooms = [max_tokens * size for size in sizes]
    loads = [(0, 0.0)] * len(sizes)
    taken: list[tuple[int, int]] = []
    work = longest = 0.0
    best = (-1.0, 0.0, 0)  # work a second, seconds, number of items
    at = 0
    while at < len(items):
        negative, item, square = items[at]
        count = -negative
        after = [
            (costs.seconds(size, load[0] + count, load[1] + square), number)
            for number, (size, load, room) in enumerate(zip(sizes, loads, rooms, strict=True))
            if count <= room or (count > largest * max_tokens and size == largest and not load[0])
        ]
        if not after:
            at = max(at + 1, bisect_left(items, -max(rooms), key=itemgetter(0)))  # the longest that fits somewhere
            continue
        seconds, chosen = min(after)
        loads[chosen] = loads[chosen][0] + count, loads[chosen][1] + square
        rooms[chosen] -= count
        taken.append((chosen, item))
        work, longest = work + lone.token * count + lone.square * square, max(longest, seconds)
        best = max(best, (work / longest, longest, len(taken)))
        at += 1
    rate, seconds, num_taken = best
    members: list[list[int]] = [[] for _ in sizes]
    for number, item in taken[:num_taken]:
        members[number].append(item)
    return rate, seconds, tuple(Group(size, tuple(some)) for size, some in zip(sizes, members, strict=True))
