"""The choice of the rows that are computed as trees (`trees.py`): those whose sequences begin alike, where it pays.
Pure."""

from collections.abc import Iterator

import numpy as np

from penstock.store.data.rows import Rows
from penstock.store.ledger.batches import pays_to_share
from penstock.workers.trainer.update.batching import plan_packed
from penstock.workers.trainer.update.sequences import sequences_of
from penstock.workers.trainer.update.trees import alike


def plan_trees(
    rows: Rows, positions: np.ndarray, max_tokens: int, *, whole_groups: bool = False, always: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """Choose which of the rows at these positions become trees, and which trees share a micro-batch. Returns the
    positions of each micro-batch, and the positions of the other rows.

    A micro-batch has `max_tokens` tokens at most, counted as trees. A group with more is cut into several trees, unless
    groups must stay whole or a single row has more. `always`: all rows become trees, whether it pays or not.
    """
    if not len(positions):
        return [], positions
    sequences = sequences_of(rows, positions)
    of_row = np.searchsorted(sequences.row_S, np.arange(len(positions) + 1)).tolist()
    trees: list[list[int]] = []
    sizes: list[int] = []
    alone: list[int] = []

    def size_of(members: list[int]) -> tuple[int, int]:
        """Tokens of these rows' sequences, and what is left of them in a tree."""
        ids = [sequences.token_ids[one] for row in members for one in range(of_row[row], of_row[row + 1])]
        num_tokens = sum(map(len, ids))
        return num_tokens, num_tokens - sum(alike(ids, np.zeros(len(ids), np.int64))[1])

    for members in _groups(rows.group_ids[positions]):
        num_tokens, num_left = size_of(members)
        if not always and not pays_to_share(num_tokens, num_tokens - num_left):
            alone += members
            continue
        if num_left <= max_tokens or whole_groups:
            trees.append(members)
            sizes.append(num_left)
            continue
        part: list[int] = []
        for row in _alike_rows(members, [sequences.token_ids[of_row[row]] for row in members]):
            if part and size_of([*part, row])[1] > max_tokens:
                trees.append(part)
                sizes.append(size_of(part)[1])
                part = []
            part.append(row)
        trees.append(part)
        sizes.append(size_of(part)[1])
    cuts = [
        positions[sorted(row for tree in cut.tolist() for row in trees[tree])]
        for cut in plan_packed(np.asarray(sizes, np.int64), max_tokens)
    ]
    return cuts, positions[sorted(alone)]


def _groups(group_ids: np.ndarray) -> Iterator[list[int]]:
    """Rows of each group."""
    for group in np.unique(group_ids):
        yield np.flatnonzero(group_ids == group).tolist()


def _alike_rows(members: list[int], first_ids: list[np.ndarray]) -> list[int]:
    """The rows, those whose first sequences begin alike next to each other."""
    order, _ = alike(first_ids, np.zeros(len(members), np.int64))
    return [members[number] for number in order]
