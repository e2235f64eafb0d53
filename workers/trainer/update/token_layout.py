"""The places of the tokens of a micro-batch's sequences, and what each token attends to. Pure.

    padded  a a a a     packed     a a a a b b c     a attends to a, b to b, c to c
            b b . .     positions  0 1 2 3 0 1 0
            c . . .

    trees   a b c d e             a b c d e f h     tokens, `[1, T]`: what several sequences begin with is there once
            a b c f        ─▶     0 1 2 3 4 3 2     position of each in its sequences
            a b h                 7 7 6 5 5 6 7     its end: the first place that does not descend from it

Padded, each sequence has a row of its own. Packed, sequences lie one after the other; a block is one sequence, which
attends to itself alone. Attention is computed block by block and costs what it costs the sequences alone; everything
else in a layer looks at one token at a time.

In a tree tokens stand in depth-first order, so that a token attends to those places up to its own whose ends lie beyond
it: its ancestors and itself. Queries are cut into blocks, each of which reads the keys of its ancestors and its own
alone: attention costs what it costs the tokens that are there.

Legend: S sequences, L tokens of one, T tokens of all, shared ones counted once, R runs of tokens between two branches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

PAD_ID = 0
"""Id of padding; any that exists: attention is causal, so what pads on the right is never seen."""


@dataclass(frozen=True)
class Blocks:
    """Lengths and positions of the blocks of a row `[1, T]`.

    blocks = Blocks.of([4, 2, 1])
    list(blocks.runs(7))    # [(1, 4), (1, 2), (1, 1)]
    """

    lengths: tuple[int, ...]
    """Tokens of each block, in their order; those of one length next to each other are computed together."""
    position_ids_1T: Tensor
    """Position of each token in its block, int64."""
    bounds: Tensor
    """Bounds of the blocks: 0, the end of the first, …, T; int32, as flash-attention's kernels take them."""

    @classmethod
    def of(cls, lengths: "np.ndarray | list[int]") -> "Blocks":
        lengths = np.asarray(lengths, np.int64)
        ends = np.cumsum(lengths)
        positions = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
        bounds = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
        return cls(tuple(lengths.tolist()), torch.from_numpy(positions).unsqueeze(0), bounds)

    def to(self, device: torch.device) -> "Blocks":
        position_ids, bounds = (one.to(device, non_blocking=True) for one in (self.position_ids_1T, self.bounds))
        return Blocks(self.lengths, position_ids, bounds)

    def some(self, first: int, last: int) -> "Blocks":
        """The blocks from number `first` to before `last`, by themselves."""
        start, end = sum(self.lengths[:first]), sum(self.lengths[:last])
        bounds = self.bounds[first : last + 1] - self.bounds[first]
        return Blocks(self.lengths[first:last], self.position_ids_1T[:, start:end], bounds)

    def runs(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Number and length of the blocks next to each other that are alike, which attention can compute at once. What
        is left of `num_tokens` is padding, and a block of its own."""
        rest = num_tokens - sum(self.lengths)
        for length, alike in groupby((*self.lengths, rest) if rest else self.lengths):
            yield sum(1 for _ in alike), length

    def all_bounds(self, num_tokens: int) -> tuple[Tensor, int]:
        """`bounds` with a block for what is left of `num_tokens`, which is padding; and the length of the longest."""
        rest, longest = num_tokens - sum(self.lengths), max(self.lengths)
        if not rest:
            return self.bounds, longest
        return torch.cat([self.bounds, self.bounds[-1:] + rest]), max(longest, rest)


def mask_of(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """What each token of a block attends to, `[L, L]` bool, queries first. None: to all before it and itself, which
    needs no mask.

    `window`: attend to so many tokens at most, the token itself among them; None: to all.
    """
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    behind = places.unsqueeze(1) - places
    return (behind >= 0) & (behind < window)


LEAST_SHARED = 4
"""Tokens of the shortest beginning that is shared. The first token that a tokenizer gives all texts is not worth a
tree."""
QUERY_TOKENS = 256
"""Most tokens of small subtrees that one call computes together. With fewer there are more calls; with more, masks hide
more of what is computed."""
Range = tuple[int, int]


@dataclass(frozen=True)
class QueryBlock:
    """Tokens that one call computes, and the tokens that they read."""

    start: int
    end: int
    reads: tuple[Range, ...]
    """Places of the keys, ascending. The last ones are the block's own."""
    is_causal: bool
    """True if each token reads all of `reads` up to itself, so that no mask is needed."""

    def mask(self, ends_T: Tensor) -> Tensor:
        """The keys that each token attends to, `[queries, keys]` bool."""
        keys = torch.cat([torch.arange(*one, device=ends_T.device) for one in self.reads])
        queries = torch.arange(self.start, self.end, device=ends_T.device).unsqueeze(1)
        return (keys <= queries) & (queries < ends_T.index_select(0, keys))


@dataclass(frozen=True)
class Trees:
    """The trees of a row `[1, T]`, one after the other.

    trees, places = Trees.of([ids, others], np.array([0, 0]))
    places[1][3]    # where the fourth token of the second sequence stands
    """

    position_ids_1T: Tensor
    """Position of each token in its sequences, int64."""
    ends_T: Tensor
    """End of each place, int64."""
    blocks: tuple[QueryBlock, ...]
    """Blocks of all tokens, in their order."""

    @classmethod
    def of(cls, token_ids: Sequence[np.ndarray], group_S: np.ndarray) -> tuple[Self, list[np.ndarray]]:
        """Trees of sequences, and the places of the tokens of each. `group_S`: sequences of one group alone share."""
        order, shared_S = shared_prefixes(token_ids, group_S)
        num_new = [len(token_ids[number]) - shared for number, shared in zip(order, shared_S, strict=True)]
        starts = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int64)
        num_tokens = int(starts[-1])
        positions, ends = np.zeros(num_tokens, np.int64), np.full(num_tokens, num_tokens, np.int64)
        places: list[np.ndarray] = [np.zeros(0, np.int64)] * len(token_ids)
        before, bounds = np.zeros(0, np.int64), set(starts.tolist())
        for number, shared, start, end in zip(order, shared_S, starts[:-1], starts[1:], strict=True):
            places[number] = np.concatenate([before[:shared], np.arange(start, end)])
            positions[start:end] = np.arange(shared, shared + end - start)
            ends[before[shared:]] = np.minimum(ends[before[shared:]], start)
            if shared:
                bounds.add(int(before[shared - 1]) + 1)
            before = places[number]
        blocks = tuple(_blocks(sorted(bounds), ends))
        return cls(torch.from_numpy(positions).unsqueeze(0), torch.from_numpy(ends), blocks), places

    @property
    def num_tokens(self) -> int:
        return len(self.ends_T)

    def to(self, device: torch.device) -> "Trees":
        positions, ends = (one.to(device, non_blocking=True) for one in (self.position_ids_1T, self.ends_T))
        return Trees(positions, ends, self.blocks)


def shared_prefixes(token_ids: Sequence[np.ndarray], group_S: np.ndarray) -> tuple[list[int], list[int]]:
    """The sequences in an order in which those that begin alike are neighbours, and how many tokens each shares with
    the one before it: none with one of another group, nor fewer than `LEAST_SHARED`."""
    keys = [(int(group), ids.astype(">u4").tobytes()) for group, ids in zip(group_S, token_ids, strict=True)]
    order = sorted(range(len(token_ids)), key=keys.__getitem__)
    shared = [0] * min(1, len(order))
    for one, other in pairwise(order):
        same = _common(token_ids[one], token_ids[other]) if group_S[one] == group_S[other] else 0
        shared.append(same if same >= LEAST_SHARED else 0)
    return order, shared


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _blocks(bounds: list[int], ends_T: np.ndarray) -> Iterator[QueryBlock]:
    """Cut the tokens between bounds of runs. A subtree of few tokens is one block, together with the next ones on the
    same branch; a longer one begins with its run."""
    above: list[Range] = []  # the runs that the next one descends from
    index, bound_of = 0, {bound: number for number, bound in enumerate(bounds)}
    while index < len(bounds) - 1:
        start, run_end = bounds[index], bounds[index + 1]
        while above and ends_T[above[-1][0]] <= start:
            above.pop()
        limit = int(ends_T[above[-1][0]]) if above else 0  # trees of their own are not computed together
        end = int(ends_T[start])
        if end - start > QUERY_TOKENS:
            # A run that descends from nothing reads itself alone, which costs half of its square.
            step = QUERY_TOKENS if above else run_end - start
            for first in range(start, run_end, step):
                last = min(first + step, run_end)
                yield QueryBlock(first, last, _merged([*above, (start, last)]), not above)
            above.append((start, run_end))
            index += 1
            continue
        while end < limit and int(ends_T[end]) - start <= QUERY_TOKENS:
            end = int(ends_T[end])
        yield QueryBlock(start, end, _merged([*above, (start, end)]), not above and end == run_end)
        index = bound_of[end]


def _merged(ranges: list[Range]) -> tuple[Range, ...]:
    """The ranges, with those that touch put together."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


@dataclass(frozen=True)
class TokenLayout:
    """Sequences laid out.

    layout = TokenLayout.padded(token_ids)
    layout.places(sequence_N, place_N)    # places in the flattened `ids_SL` of tokens of sequences
    """

    ids_SL: np.ndarray
    lengths_S: np.ndarray
    starts_S: np.ndarray
    """Place of the first token of each sequence."""
    blocks: Blocks | Trees | None = None
    paths: np.ndarray | None = None
    """Places of the tokens of all sequences, one sequence after the other; None: each stands in one piece."""

    @classmethod
    def padded(cls, token_ids: Sequence[np.ndarray]) -> Self:
        lengths_S = _lengths(token_ids)
        width = max(1, int(lengths_S.max()))
        return cls._filled(token_ids, (len(lengths_S), width), lengths_S, np.arange(len(lengths_S)) * width)

    @classmethod
    def packed(cls, token_ids: Sequence[np.ndarray]) -> Self:
        """The longest sequence first."""
        lengths_S = _lengths(token_ids)
        order = np.argsort(-lengths_S, kind="stable")
        starts_S = np.zeros_like(lengths_S)
        starts_S[order] = np.cumsum(lengths_S[order]) - lengths_S[order]
        return cls._filled(token_ids, (1, int(lengths_S.sum())), lengths_S, starts_S, Blocks.of(lengths_S[order]))

    @classmethod
    def trees(cls, token_ids: Sequence[np.ndarray], group_S: np.ndarray) -> Self:
        """`group_S`: sequences of one group alone share what they begin with."""
        trees, places = Trees.of(token_ids, group_S)
        paths, lengths_S = np.concatenate(places), _lengths(token_ids)
        ids_1L = np.full((1, trees.num_tokens), PAD_ID, np.int64)
        ids_1L[0, paths] = np.concatenate(token_ids)
        return cls(ids_1L, lengths_S, np.array([of_one[0] for of_one in places], np.int64), trees, paths)

    @classmethod
    def _filled(
        cls, token_ids: Sequence[np.ndarray], shape: tuple[int, int], lengths_S: np.ndarray, starts_S: np.ndarray,
        blocks: Blocks | None = None,
    ) -> Self:  # fmt: skip
        ids_flat = np.full(shape[0] * shape[1], PAD_ID, np.int64)
        for start, ids in zip(starts_S.tolist(), token_ids, strict=True):
            ids_flat[start : start + len(ids)] = ids
        return cls(ids_flat.reshape(shape), lengths_S, starts_S, blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens that are there: those of all sequences, less what is shared."""
        return self.ids_SL.size if self.paths is not None else int(self.lengths_S.sum())

    @property
    def num_shared(self) -> int:
        """Tokens of sequences that others have computed."""
        return int(self.lengths_S.sum()) - self.num_tokens

    def places(self, sequence_N: np.ndarray, place_N: np.ndarray) -> np.ndarray:
        """Places in the flattened `ids_SL` of the tokens at `place_N` of their sequences, int64."""
        if self.paths is None:
            return self.starts_S[sequence_N] + place_N
        firsts_S = np.cumsum(self.lengths_S) - self.lengths_S
        return self.paths[firsts_S[sequence_N] + place_N]


def _lengths(token_ids: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([len(ids) for ids in token_ids], np.int64)
