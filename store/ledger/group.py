"""A resident group: the ledger's knowledge of its rows, as bit masks over the samples (bit i is sample i).

A write, a lease or a drop of any number of a group's rows is a few integer operations. Row ids are arithmetic:
`row_id = group_id * group_size + sample`, so no table maps rows to groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

NO_VERSION = 2**62
"""Oldest version of a row without tokens: newer than any, so it is never stale."""


@dataclass(frozen=True)
class Facts:
    """Facts of the rows of a write, for the ledger: lists of one entry a row, None where no column tells."""

    row_bytes: list[int]
    oldest_version: list[int] | None = None
    response_tokens: list[int] | None = None
    prompt_tokens: list[int] | None = None
    token_column: str = ""
    token_lengths: list[int] | None = None
    """Entries of each row of `token_column`, any of the token columns written."""
    context_tokens: list[int] | None = None
    """Tokens of a trajectory that were read and not sampled."""
    rewards: list[float] | None = None

    @classmethod
    def concat(cls, parts: "Sequence[Facts]") -> "Facts":
        """Facts of all rows of `parts`, which are writes of the same columns."""
        first = parts[0]
        names = [name for name, known in vars(first).items() if isinstance(known, list)]
        joined: dict[str, Any] = {name: [value for part in parts for value in getattr(part, name)] for name in names}
        return replace(first, **joined)


class Group:
    """State of a group between admission and the end of its last row. Masks are indexed by column or by stage
    number."""

    __slots__ = (
        "context_tokens", "done", "free", "have", "holders", "id", "leased", "live", "lost", "oldest", "prompt_tokens",
        "queued", "response_tokens", "row_bytes", "shared_bytes", "trained_in",
    )  # fmt: skip

    def __init__(self, id: int, size: int, num_columns: int, num_stages: int) -> None:
        self.id = id
        self.live = (1 << size) - 1
        """Rows neither dropped nor trained."""
        self.lost = 0
        """Rows of a batch that have lost values since it was formed."""
        self.have = [0] * num_columns
        """Rows that have a column, by column."""
        self.leased = [0] * num_stages
        """Rows that some lease holds open, by stage."""
        self.done = [0] * num_stages
        """Rows that a stage has completed, by stage."""
        self.free = [0] * num_stages
        """Rows that may be leased now, by stage."""
        self.queued = 0
        """Stages in whose queue the group stands: bit s for stage s."""
        self.holders: set[int] | None = None
        """Leases with open rows here; None until the first."""
        self.oldest = [NO_VERSION] * size
        self.response_tokens = [0] * size
        self.prompt_tokens = 0
        self.context_tokens = [0] * size
        """Context tokens of trajectories, which have no prompt in common."""
        self.row_bytes = [0] * (num_stages * size)
        """Bytes of the values that stage s wrote for sample i, at `s * size + i`."""
        self.shared_bytes = 0
        self.trained_in: int | None = None
        """The version that the step began with that trains or trained it."""

    def copy(self) -> "Group":
        """Copy the state that a snapshot has of the group, which later events leave as it is."""
        copied = Group.__new__(Group)
        copied.id, copied.live, copied.prompt_tokens, copied.shared_bytes = (
            self.id, self.live, self.prompt_tokens, self.shared_bytes,
        )  # fmt: skip
        copied.have, copied.done, copied.oldest = self.have[:], self.done[:], self.oldest[:]
        copied.response_tokens, copied.context_tokens = self.response_tokens[:], self.context_tokens[:]
        copied.row_bytes = self.row_bytes[:]
        return copied

    @property
    def nbytes(self) -> int:
        return self.shared_bytes + sum(self.row_bytes)

    def oldest_version(self) -> int:
        """The oldest version over the live rows."""
        return min(self.of_live(self.oldest), default=NO_VERSION)

    def of_live(self, values: list[int]) -> list[int]:
        """Values of the live rows."""
        if self.live == (1 << len(values)) - 1:
            return values
        return [values[index] for index in bits(self.live)]


def bits(mask: int) -> Iterator[int]:
    """Positions of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def untouched(group: Group, mask: int, columns: tuple[int, ...]) -> int:
    """Rows of the mask for which no worker has written any of the columns."""
    have = group.have
    for column in columns:
        mask &= ~have[column]
    return mask


def row_ids(group_id: int, mask: int, size: int) -> list[int]:
    """Ids of the rows of a mask, ascending."""
    first = group_id * size
    if mask == (1 << size) - 1:
        return list(range(first, first + size))
    return [first + index for index in bits(mask)]


Span = tuple[int, int, range]
"""Rows that lie side by side in one group: the group, the position of the first, and which samples."""


def spans_of(rows: Sequence[int], size: int) -> list[Span]:
    """Split rows into spans `(group_id, position, indices)` that lie side by side: `rows[position + k]` is sample
    `indices[k]`.

    Whole groups, which is what is mostly written and leased, are one span each and found without a loop over the rows;
    so are all of them at once, where one follows the other.

    >>> spans_of([8, 9, 10, 11, 2, 3], 4)
    [(2, 0, range(0, 4)), (0, 4, range(2, 4))]
    """
    rows = rows if isinstance(rows, list) else list(rows)
    spans, position, count = [], 0, len(rows)
    if count and rows[0] % size == 0 and count % size == 0 and _ascends(rows, 0, count):
        first, whole = rows[0] // size, range(size)
        return [(first + number, number * size, whole) for number in range(count // size)]
    while position < count:
        row = rows[position]
        group_id, first = divmod(row, size)
        end = position + size - first
        if not (end <= count and _ascends(rows, position, end)):
            end = position + 1
            while end < count and rows[end] == rows[end - 1] + 1 and rows[end] // size == group_id:
                end += 1
        spans.append((group_id, position, range(first, first + end - position)))
        position = end
    return spans


def _ascends(rows: list[int], start: int, end: int) -> bool:
    first = rows[start]
    return rows[end - 1] - first == end - 1 - start and rows[start:end] == list(range(first, first + end - start))


def mask_of(indices: range) -> int:
    return (1 << len(indices)) - 1 << indices.start


def masks_of(spans: Sequence[Span]) -> dict[int, int]:
    """Masks of the rows, `{group_id: mask}`, in order of first appearance. Rows given twice count once."""
    masks: dict[int, int] = {}
    for group_id, _, indices in spans:
        masks[group_id] = masks.get(group_id, 0) | mask_of(indices)
    return masks


def num_rows(masks: Mapping[int, int]) -> int:
    """Number of rows in masks by group."""
    return sum(map(int.bit_count, masks.values()))
