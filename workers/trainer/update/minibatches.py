"""The minibatches of an update, one an optimizer step: rows cut on all ranks alike, and what the loss reads of them.

A batch is cut into minibatches of whole groups, and those into micro-batches, as many on every rank. `batching.py`
decides how rows are cut; here ranks exchange the result. Rows whose sequences begin alike are computed as trees
(`token_layout.py`) where it pays.

The loss of a dataflow names what it reads (`Dataflow.train`, `algorithms/losses/`): columns of the rows, and what only
the trainer has. Its arguments are found once, from its signature.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.graph.columns import CANDIDATE_LOGPROBS, CANDIDATES
from penstock.algorithms.graph.stage import PROVIDED_BY_TRAINER
from penstock.conf.errors import DataflowError, suggest
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.store.ledger.batches import GroupLoad, pays_to_share, spread
from penstock.workers.protocols import Loss
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.batching import MicroBatch, plan_packed
from penstock.workers.trainer.update.picture_places import PictureReader, picture_weights
from penstock.workers.trainer.update.rank_groups import PassCosts, group_at, plan_passes
from penstock.workers.trainer.update.sequences import Shapes, sequences_of, shapes_of
from penstock.workers.trainer.update.token_layout import shared_prefixes


@dataclass(frozen=True)
class Minibatch:
    """The data of one optimizer step: this rank's micro-batches (as many as on any rank) and totals over all ranks."""

    batches: list[MicroBatch]
    totals: BatchTotals


@dataclass(frozen=True)
class LossSignature:
    """A loss and what it reads. `columns` are those that it must have and those of its optional ones that the rows
    bring.
    """

    loss: Loss
    columns: tuple[str, ...]
    takes_entropy: bool
    takes_old_logprobs: bool
    provided: tuple[str, ...]

    @classmethod
    def of(cls, loss: Loss, names: tuple[str, ...]) -> "LossSignature":
        """Find what a loss reads. `names`: columns of the rows. Raises `DataflowError` for a column that the loss needs
        and the rows lack."""
        provided, columns = [], []
        for name, parameter in inspect.signature(loss).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if name in PROVIDED_BY_TRAINER:
                provided.append(name)
                if name != CANDIDATE_LOGPROBS:
                    continue
                name = CANDIDATES  # which it computes them of
            if parameter.default is parameter.empty:
                if name not in names:
                    raise DataflowError(
                        f"the loss reads column {name!r}, which the rows lack{suggest(name, names)} "
                        "Let a stage before flow.train write it, or give the parameter a default."
                    )
                columns.append(name)
            elif parameter.default is None and name in names:
                columns.append(name)
        return cls(loss, tuple(columns), "entropy" in provided, "old_logprobs" in provided, tuple(provided))

    @property
    def takes_groups(self) -> bool:
        """True if the samples of a group must be in one micro-batch."""
        return "group_ids" in self.provided

    def call(
        self, batch: MicroBatch, totals: BatchTotals, of_model: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's contribution to the loss, `[]` with gradient, and to each metric. `of_model`: the
        model's outputs, by the names that a loss has for them. Raises `DataflowError` if this model lacks an output
        that the loss asks for."""
        available = {**of_model, "mask": batch.mask_BT, "totals": totals, "group_ids": batch.group_ids_B}
        missing = [name for name in self.provided if name not in available]
        if missing:
            raise DataflowError(
                f"the loss takes {missing[0]!r}, and the model that it trains gives {', '.join(sorted(of_model))}. "
                "Only a policy gives log-probabilities, only a critic values, only a reward model scores."
            )
        arguments = {name: available[name] for name in self.provided}
        return self.loss(**arguments, **{name: batch.columns[name] for name in self.columns if name != CANDIDATES})


def share_of_rank(rows: Rows, loss: Loss, rank: int, num_ranks: int) -> list[int]:
    """Positions of the rows that a rank computes, where all ranks have all rows: balanced by what they cost, in whole
    groups where the loss compares their samples. Raises as `LossSignature.of` does."""
    order = np.argsort(rows.group_ids, kind="stable")
    ends = np.flatnonzero(np.diff(rows.group_ids[order])) + 1
    loads = [GroupLoad(0, own.tolist()) for own in np.split(shapes_of(rows).num_tokens[order], ends)]
    is_whole = LossSignature.of(loss, rows.names).takes_groups
    share = spread(loads, num_ranks, whole_groups=is_whole)[rank]
    return sorted(order[share].tolist())


@dataclass(frozen=True)
class Batcher:
    """Cuts the rows of one rank. Both methods are collective, and raise `DataError` for a row that does not fit the
    model."""

    ranks: Ranks
    config: TrainerConfig
    max_length: int | None
    """Longest sequence of prompt and response, in tokens; None: unbounded."""
    rows_alone: bool = False
    """True if each row is a micro-batch in a pass without a loss: sums in matrix products depend on the shape, so among
    others a row may come out with other last bits."""
    packed: bool = False
    """True if rows of a micro-batch lie one after the other, without padding."""
    reader: PictureReader | None = None
    """Reads the pictures of a vision model; None: it reads text only."""
    sharing: str = "never"
    """Whether rows of a group are computed as trees: never, auto (where it pays), or always. Rows alone never are."""
    costs: PassCosts | None = None
    """Costs by which ranks of the block choose groups for each micro-batch; None: all compute all of its rows."""

    def microbatches(self, rows: Rows) -> list[MicroBatch]:
        """Cut all rows for a pass without a loss."""
        self._prepare_pictures(rows)
        parts = np.arange(len(rows)).reshape(-1, 1) if self.rows_alone else [np.arange(len(rows))]
        batches = [batch for part in parts for batch in self._cut(rows, part, ())]
        count = max(self.ranks.gather(len(batches)))
        return self._pad(batches, count)

    def minibatches(self, rows: Rows, inputs: LossSignature, count: int) -> list[Minibatch]:
        """Make `count` minibatches, one for each optimizer step of an update, with the columns that the loss takes."""
        self._prepare_pictures(rows)
        compared = ("behavior_logprobs",) if "behavior_logprobs" in rows else ()
        columns = tuple(dict.fromkeys((*inputs.columns, *compared)))
        every_group = self.ranks.gather(np.unique(rows.group_ids)) if count > 1 else []
        parts = batching.split_minibatches(rows.group_ids, np.concatenate(every_group) if every_group else [], count)
        cuts = [self._cut(rows, part, columns, whole_groups=inputs.takes_groups) for part in parts]
        sizes = [
            (
                len(batches),
                sum((_totals(batch, inputs.takes_groups) for batch in batches if batch.is_counted), BatchTotals(0, 0)),
            )
            for batches in cuts
        ]
        minibatches = []
        for batches, others in zip(cuts, zip(*self.ranks.gather_ranks(sizes), strict=True), strict=True):
            totals = sum((other for _, other in others), BatchTotals(0, 0))
            minibatches.append(Minibatch(self._pad(batches, max(number for number, _ in others)), totals))
        return minibatches

    def _prepare_pictures(self, rows: Rows) -> None:
        if self.reader is not None:
            self.reader.prepare(rows)

    def _cut(
        self, rows: Rows, positions: np.ndarray, columns: tuple[str, ...], *, whole_groups: bool = False
    ) -> list[MicroBatch]:
        """Cut these rows and move them to the device."""
        shapes = batching.row_shapes(rows, self.max_length)
        trees, sizes = list[np.ndarray](), np.zeros(0, np.int64)
        if self.sharing != "never" and not self.rows_alone:
            trees, sizes, positions = find_trees(
                rows, positions, self.config.microbatch_tokens, whole_groups=whole_groups,
                always=self.sharing == "always",
            )  # fmt: skip
        of_trees = partial(batching.collate, rows, columns=columns, shared=True)
        of_rows = partial(batching.collate, rows, columns=columns, packed=self.packed, reader=self.reader)
        if self.costs is not None:
            squares = [size * shapes.longest[tree].max() for tree, size in zip(trees, sizes, strict=True)]
            items = self._items(rows, positions, shapes, whole_groups)
            return [
                *self._grouped(of_trees, trees, sizes, np.asarray(squares), self.costs),
                *self._grouped(of_rows, *items, self.costs),
            ]
        cuts = self._plan(rows, positions, Shapes(*(of_rows[positions] for of_rows in shapes)), whole_groups)
        batches = [of_trees(cut) for cut in pack_trees(trees, sizes, self.config.microbatch_tokens)]
        batches += [of_rows(cut) for cut in cuts]
        return [replace(batch.to(self.ranks.device), is_counted=self.ranks.reports_rows) for batch in batches]

    def _items(
        self, rows: Rows, positions: np.ndarray, shapes: Shapes, whole_groups: bool
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """What is computed by one group of ranks: positions of each row, or of each whole group, and their tokens and
        squares."""
        tokens, squares = shapes.num_tokens[positions], (shapes.num_tokens * shapes.longest)[positions]
        if self.reader is not None:
            tokens = tokens + picture_weights(rows, positions, self.reader)
        if not whole_groups:
            return [positions[row : row + 1] for row in range(len(positions))], tokens, squares
        groups, group_of = np.unique(rows.group_ids[positions], return_inverse=True)
        tokens, squares = (np.bincount(group_of, weights=of_rows).astype(np.int64) for of_rows in (tokens, squares))
        return [positions[group_of == group] for group in range(len(groups))], tokens, squares

    def _grouped(
        self, collate: Callable[[np.ndarray], MicroBatch], items: list[np.ndarray], tokens: np.ndarray,
        squares: np.ndarray, costs: PassCosts,
    ) -> list[MicroBatch]:  # fmt: skip
        """This rank's micro-batches in passes over all items of its block."""
        block = self.ranks.block
        assert block is not None
        batches = []
        for groups in plan_passes(tokens, squares, block.size(), self.config.microbatch_tokens, costs):
            own = group_at(groups, block.rank())
            batch = self._dummy()
            if own.items:
                batch = collate(np.sort(np.concatenate([items[item] for item in own.items]))).to(self.ranks.device)
            is_counted = self.ranks.rank % (own.size * self.config.tensor_parallel_size) == 0
            batches.append(replace(batch, group_size=own.size, is_counted=is_counted))
        return batches

    def _dummy(self) -> MicroBatch:
        return batching.dummy(self.ranks.device, packed=self.packed, reader=self.reader)

    def _plan(self, rows: Rows, positions: np.ndarray, shapes: Shapes, whole_groups: bool) -> list[np.ndarray]:
        """Positions of each micro-batch of rows that share nothing. `shapes`: theirs."""
        budget, groups = self.config.microbatch_tokens, rows.group_ids[positions] if whole_groups else None
        picture_tokens = None if self.reader is None else picture_weights(rows, positions, self.reader)
        if self.packed:
            cuts = batching.plan_packed(
                shapes.num_tokens + (0 if picture_tokens is None else picture_tokens), budget, groups
            )
        elif groups is not None:
            cuts = batching.plan_groups(shapes.longest, groups, budget, shapes.num_sequences, picture_tokens)
        else:
            cuts = batching.plan(shapes.longest, budget, shapes.num_sequences, picture_tokens)
        return [positions[cut] for cut in cuts]

    def _pad(self, batches: list[MicroBatch], count: int) -> list[MicroBatch]:
        return batching.pad_plan(batches, count, self.ranks.device, packed=self.packed, reader=self.reader)


def _totals(batch: MicroBatch, whole_groups: bool) -> BatchTotals:
    """Totals of one micro-batch. Groups can be counted where none is cut apart."""
    totals = BatchTotals.of(batch.mask_BT)
    return replace(totals, num_groups=len(batch.group_ids_B.unique())) if whole_groups else totals


def find_trees(
    rows: Rows, positions: np.ndarray, max_tokens: int, *, whole_groups: bool = False, always: bool = False
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Choose which of the rows at these positions become trees. Returns the positions of each tree, its tokens, and
    the positions of the other rows.

    A tree has `max_tokens` tokens at most. A group with more is cut into several trees, unless groups must stay whole
    or a single row has more. `always`: all rows become trees, whether it pays or not.
    """
    if not len(positions):
        return [], np.zeros(0, np.int64), positions
    sequences = sequences_of(rows, positions)
    of_row = np.searchsorted(sequences.row_S, np.arange(len(positions) + 1)).tolist()
    trees: list[list[int]] = []
    sizes: list[int] = []
    alone: list[int] = []

    def size_of(members: list[int]) -> tuple[int, int]:
        """Tokens of these rows' sequences, and what is left of them in a tree."""
        ids = [sequences.token_ids[one] for row in members for one in range(of_row[row], of_row[row + 1])]
        num_tokens = sum(map(len, ids))
        return num_tokens, num_tokens - sum(shared_prefixes(ids, np.zeros(len(ids), np.int64))[1])

    group_ids = rows.group_ids[positions]
    for group in np.unique(group_ids):
        members = np.flatnonzero(group_ids == group).tolist()
        num_tokens, num_left = size_of(members)
        if not always and not pays_to_share(num_tokens, num_tokens - num_left):
            alone += members
            continue
        if num_left <= max_tokens or whole_groups:
            trees.append(members)
            sizes.append(num_left)
            continue
        part: list[int] = []
        order, _ = shared_prefixes(
            [sequences.token_ids[of_row[row]] for row in members], np.zeros(len(members), np.int64)
        )
        for row in (members[number] for number in order):
            if part and size_of([*part, row])[1] > max_tokens:
                trees.append(part)
                sizes.append(size_of(part)[1])
                part = []
            part.append(row)
        trees.append(part)
        sizes.append(size_of(part)[1])
    return [positions[tree] for tree in trees], np.asarray(sizes, np.int64), positions[sorted(alone)]


def pack_trees(trees: list[np.ndarray], sizes: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Choose which trees share a micro-batch, of `max_tokens` tokens at most: positions of each."""
    return [np.sort(np.concatenate([trees[tree] for tree in cut])) for cut in plan_packed(sizes, max_tokens)]
