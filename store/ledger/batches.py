"""Batches: which groups are next, strict FIFO or within a window past a straggler, and the split of their rows over
data-parallel ranks, so that no rank waits long for another. Pure and deterministic.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

SUM = itemgetter(0)
QUADRATIC_TOKENS = 4096
"""Length at which attention costs a token as much as everything else does: 6 to 12 times the hidden size, more with a
large vocabulary. Where it is really 2,000 tokens, or infinitely many, the heaviest of ranks with 64 long-tailed rows
each costs some 2% more than their mean; counting tokens only, it was up to 8%.
"""
SAVED_TOKENS, SAVED_SHARE = 32, 0.15
"""Tokens of a group that must be saved, and their share of all of its tokens, for it to be worth a tree's masks and
calls (`trainer.share_prefixes`). Measured on a CPU, 4M parameters: 8 saved tokens of 32 cost 1.15 times as much as rows
alone, 24 of 64 a tenth less, 35 of 72 a quarter less; with 12% or 22% of longer groups there is no difference."""


class GroupLoad(NamedTuple):
    """The tokens of a group."""

    prompt: int
    """Those that all of its rows begin with."""
    rows: Sequence[int]
    """Those of each row, the prompt's among them."""

    @property
    def is_tree(self) -> bool:
        """True if its rows are to be computed as a tree."""
        return pays_to_share(sum(self.rows), (len(self.rows) - 1) * self.prompt)

    @property
    def cost(self) -> int:
        """The cost of its rows. The prompt of a tree is computed once."""
        of_prompt = row_cost(self.prompt) if self.is_tree else 0
        return of_prompt + sum(row_cost(tokens) - of_prompt for tokens in self.rows)


def choose_groups(
    first: int, end: int, count: int, window: int, is_waiting: Callable[[int], bool], is_complete: Callable[[int], bool]
) -> list[int] | None:
    """The `count` oldest complete groups that may be taken one after the other, or None if there are not so many.

    Groups are numbered in the order of admission; those waiting lie in `[first, end)`. A group may be taken while its
    number is less than `window` above that of the oldest one that still waits. So whichever group lags, at most
    `window - 1` later ones overtake it: the window does not slide on while its oldest group stays. 1 is strict FIFO.

        complete = {1, 2, 3}; choose_groups(0, 4, 2, 3, ...)  # [1, 2]: group 0 lags and is overtaken by two
        complete = {1, 2, 3}; choose_groups(0, 4, 3, 3, ...)  # None: group 3 would be the third to overtake it
    """
    chosen: list[int] = []
    group, limit, lags = first, end, False
    while len(chosen) < count:
        if group >= limit:
            return None
        if is_waiting(group):
            if is_complete(group):
                chosen.append(group)
            elif not lags:
                limit, lags = min(end, group + window), True
        group += 1
    return chosen


def row_cost(num_tokens: int) -> int:
    """The cost of a forward and backward pass of a row of this length, in tokens of a short one."""
    return num_tokens + num_tokens * num_tokens // QUADRATIC_TOKENS


def pays_to_share(num_tokens: int, num_saved: int) -> bool:
    """True if a group of so many tokens is to be computed as a tree, which saves so many of them."""
    return num_saved >= max(SAVED_TOKENS, SAVED_SHARE * num_tokens)


def spread(
    groups: Sequence[GroupLoad], num_parts: int, *, whole_groups: bool = False, shares: bool = False
) -> list[list[int]]:
    """Spread the rows of groups over parts, balanced by cost: positions of rows, counted through all groups, each part
    ascending. `whole_groups`: none is cut apart. `shares`: prompts are computed once a part, so that a group which is
    worth it is not cut apart, unless that makes the costliest part cheaper."""
    plain = _spread(groups, num_parts, [whole_groups] * len(groups), shares=shares)
    if whole_groups or not shares or num_parts == 1:
        return plain
    trees = _spread(groups, num_parts, [group.is_tree for group in groups], shares=True)
    return min(trees, plain, key=lambda parts: largest_cost(groups, parts))


def _spread(groups: Sequence[GroupLoad], num_parts: int, is_whole: Sequence[bool], *, shares: bool) -> list[list[int]]:
    units: list[list[int]] = []
    costs: list[int] = []
    first = 0
    for group, whole in zip(groups, is_whole, strict=True):
        rows = list(range(first, first + len(group.rows)))
        first += len(rows)
        if whole:
            units.append(rows)
            costs.append(group.cost if shares else sum(map(row_cost, group.rows)))
        else:
            units.extend([row] for row in rows)
            costs.extend(map(row_cost, group.rows))
    return [[row for unit in part for row in units[unit]] for part in balance(costs, num_parts)]


def largest_cost(groups: Sequence[GroupLoad], parts: Sequence[Sequence[int]]) -> int:
    """The cost of the costliest part, in which prompts are computed once where that pays."""
    owners = [number for number, group in enumerate(groups) for _ in group.rows]
    lengths = [length for group in groups for length in group.rows]

    def cost(part: Sequence[int]) -> int:
        by_group = groupby(part, owners.__getitem__)
        return sum(GroupLoad(groups[owner].prompt, [lengths[row] for row in rows]).cost for owner, rows in by_group)

    return max(map(cost, parts))


def balance(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Positions of `costs` in `num_parts` parts with nearly equal sums, each ascending; parts may be empty.

    The largest differencing method of Karmarkar and Karp (1982, generalised to k parts): repeatedly merge the two
    partial solutions that are the most uneven, the heaviest part of one with the lightest of the other.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    # A solution is up to k (sum, tree of positions) pairs, heaviest first; parts that are left out are empty. The
    # serial number makes ties deterministic.
    heap: list[tuple[int, int, list[tuple[int, Any]]]] = [
        (-cost, position, [(cost, position)]) for position, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    for serial in range(len(costs), 2 * len(costs) - 1):
        _, _, first = heapq.heappop(heap)
        merged = _merge(first, heap[0][2], num_parts)
        lightest = merged[-1][0] if len(merged) == num_parts else 0
        heapq.heapreplace(heap, (lightest - merged[0][0], serial, merged))
    parts = [sorted(_positions(tree)) for _, tree in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def _merge(first: list[tuple[int, Any]], second: list[tuple[int, Any]], num_parts: int) -> list[tuple[int, Any]]:
    """Merge the heaviest part of one with the lightest of the other, and so on. Trees, since lists would be copied at
    every merge."""
    alone = num_parts - len(second)
    merged = first[:alone] + second[: num_parts - len(first)]
    merged += [
        (a + b, (left, right))
        for (a, left), (b, right) in zip(first[alone:], reversed(second[num_parts - len(first) :]), strict=True)
    ]
    merged.sort(key=SUM, reverse=True)
    return merged


def _positions(tree: Any) -> list[int]:
    found, left = [], [tree]
    while left:
        branch = left.pop()
        if isinstance(branch, tuple):
            left.extend(branch)
        else:
            found.append(branch)
    return found
