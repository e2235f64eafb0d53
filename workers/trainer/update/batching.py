"""Rows to micro-batches: pure and deterministic, so that a straight-line loop can build the very same tensors.

    rows ──split_minibatches──▶ whole groups an optimizer step ──plan──▶ positions a micro-batch ──collate──▶ MicroBatch

A micro-batch holds rows of similar length, padded on the right to its longest, or any rows one after the other without
padding (`trainer.packing`), or the rows of groups as trees (`trainer.share_prefixes`): `token_layout.py` has the places
of their tokens. A row is one sequence, or if it is a trajectory several (`sequences.py`); none is cut apart from the
others of its row.

Legend: B rows of the micro-batch, S their sequences (S = B where none is a trajectory), L tokens of the longest one, T
of the longest response, N response tokens. Packed, S is 1 and L the tokens of all sequences. W bytes of a token's
record (`workers/models/routed_experts.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.algorithms.graph.columns import CANDIDATES, ROUTED_EXPERTS
from penstock.conf.errors import DataError
from penstock.store.data.rows import Rows
from penstock.workers.trainer.update.picture_places import PictureReader, Pictures, pictures_of, place
from penstock.workers.trainer.update.sequences import TARGETS, TEMPERATURES, Shapes, select, sequences_of, shapes_of
from penstock.workers.trainer.update.token_layout import PAD_ID, Blocks, TokenLayout, Trees

MICROBATCH_COST_TOKENS = 64
"""Padding worth saving by one more micro-batch. Measured on a CPU, 3M parameters: about 25. GPUs would rather have a
few large ones, which rows of thousands of tokens give anyway.
"""
CANDIDATE_COLUMNS = (CANDIDATES, "teacher_candidates")
"""Columns with several values for each response token, as many for each of them."""
UNREAD = -1
"""Byte of the record of a token that no engine has read: the last of a sequence, and padding."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward-backward. `rows`: positions of its rows in the Rows it was made of; empty for a dummy."""

    rows: np.ndarray
    input_ids_SL: Tensor
    positions_N: Tensor
    """Places into `[S * L]` that predict the response tokens, row by row."""
    targets_N: Tensor
    slots_N: Tensor
    """Places into `[B * T]` where each response token belongs."""
    mask_BT: Tensor
    """Mask (bool): True for response tokens."""
    last_B: Tensor
    """Place into `[S * L]` of the last response token of each row, which has at least one; of a dummy, of any."""
    group_ids_B: Tensor
    """Group of each row, int64."""
    num_tokens: int = 0
    """Tokens of all sequences, less those that are shared; what is left of `[S, L]` is padding."""
    num_shared: int = 0
    """Tokens of sequences that others of them have, too, and that are computed there (`Trees`)."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    targets_each: int = 1
    """Targets of each place, which follow one another in `targets_N`: data of the SDK may have several."""
    candidates_NJ: Tensor | None = None
    """Tokens that are scored in the place of each response token beside it, int64; None: none are."""
    temperature: float | None = None
    """Temperature at which all response tokens were sampled; None: the run's, or one of `temperatures_N` for each."""
    temperatures_N: Tensor | None = None
    blocks: Blocks | Trees | None = None
    """Blocks of `input_ids_SL`, one a sequence, or trees of them; None: sequences are padded."""
    experts_SLW: Tensor | None = None
    """Records of the experts that the engine chose, `[S * L, W]` int16, `UNREAD` where it has not read the token;
    None: not recorded."""
    pictures: Pictures | None = None
    """Pictures, if only a blank one; None: the model reads text only. They stay on the host until they are read: in
    a batch with pictures it is most of the bytes."""
    group_size: int | None = None
    """Ranks that split its tokens, where that is chosen for each micro-batch; None: as many as may."""
    is_counted: bool = True
    """False on all ranks but the first of those that compute it."""

    @property
    def is_dummy(self) -> bool:
        return len(self.rows) == 0

    @property
    def scored(self) -> Tensor:
        """Tokens whose log-probabilities are computed: the response tokens `[N]`, or with candidates `[N, 1 + J]`; of
        K targets in each place `[N / K, K]`, so that hidden states meet the output layer once."""
        if self.targets_each > 1:
            return self.targets_N.view(-1, self.targets_each)
        if self.candidates_NJ is None:
            return self.targets_N
        return torch.cat([self.targets_N.unsqueeze(1), self.candidates_NJ], dim=1)

    @property
    def places(self) -> Tensor:
        """Places that predict what is `scored`, one for each of its rows."""
        return self.positions_N[:: self.targets_each]

    def per_target(self, values: Tensor) -> Tensor:
        """Values of each of the targets, `[N]`, of what the model answers for `scored`: one for each, or for each
        place."""
        if self.targets_each == 1:
            return values
        return values.reshape(-1) if values.dim() > 1 else values.repeat_interleave(self.targets_each)

    def scatter(self, values_N: Tensor) -> Tensor:
        """Spread values of the response tokens, `[N]` or `[N, J]`, to `[B, T]` or `[B, T, J]`, 0 in padding,
        differentiable."""
        shape = (*self.mask_BT.shape, *values_N.shape[1:])
        if self.mask_BT.numel() == len(values_N):
            return values_N.view(shape)
        flat = values_N.new_zeros((self.mask_BT.numel(), *values_N.shape[1:]))
        return flat.index_copy(0, self.slots_N, values_N).view(shape)

    def pad(self, arrays: "Sequence[np.ndarray]") -> Tensor:
        """Spread a float32 `[T_i]` array for each row to `[B, T]`, 0 in padding, on the micro-batch's device."""
        return self.scatter(torch.from_numpy(np.concatenate(arrays)).to(self.slots_N.device))

    def to(self, device: torch.device) -> "MicroBatch":
        if self.slots_N.device == device:
            return self
        held = ((item.name, getattr(self, item.name)) for item in fields(self))
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in held if isinstance(value, Tensor)
        }
        moved["blocks"] = None if self.blocks is None else self.blocks.to(device)
        moved["columns"] = {name: value.to(device) for name, value in self.columns.items()}
        return replace(self, **moved)


def row_shapes(rows: Rows, max_length: int | None = None) -> Shapes:
    """Sizes of the rows. Raises `DataError` for a row with a sequence longer than `max_length` or without prompt."""
    shapes = shapes_of(rows)
    lengths = shapes.longest
    if max_length is not None and len(lengths) and lengths.max() > max_length:
        position = int(lengths.argmax())
        raise DataError(
            f"row {rows.row_ids[position]} has a sequence of {lengths[position]} tokens, prompt and response together, "
            f"more than the model's {max_length} positions. Lower data.max_prompt_tokens, rollout.sampling.max_tokens "
            "or rollout.max_model_len, or take a model with a longer context."
        )
    return shapes


def plan(
    lengths: np.ndarray, max_tokens: int, counts: np.ndarray | None = None, picture_tokens: np.ndarray | None = None
) -> list[np.ndarray]:
    """Choose which rows share a micro-batch: positions, each row exactly once. `counts`: sequences of each row; None:
    one. `picture_tokens`: cost of the pictures of each row, in tokens, which counts beside the padded ones; None: none.

    Rows are ordered by length, longest first (equal ones stay in order), and cut where padded tokens plus
    `MICROBATCH_COST_TOKENS` a micro-batch are least. Sequences x longest <= `max_tokens`; a row larger than that is a
    micro-batch of its own. Rows of one length that fit are one micro-batch in row order.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    sequences = np.concatenate([[0], np.cumsum(np.ones(len(order), np.int64) if counts is None else counts[order])])
    weights = None if picture_tokens is None else np.concatenate([[0], np.cumsum(picture_tokens[order])])
    count = len(order)
    cheapest = np.zeros(count + 1)  # of the rows from here on
    ends = np.zeros(count, dtype=np.int64)
    for start in range(count - 1, -1, -1):
        longest = max(1, int(sorted_lengths[start]))
        if weights is None:
            fitting = (
                int(np.searchsorted(sequences, sequences[start] + max_tokens // longest, side="right")) - 1 - start
            )
        else:
            loads = (sequences[start:] - sequences[start]) * longest + weights[start:] - weights[start]
            fitting = int(np.searchsorted(loads, max_tokens, side="right")) - 1
        num_rows = np.arange(1, max(1, fitting) + 1)
        num_sequences = sequences[start + num_rows] - sequences[start]
        costs = num_sequences * longest + MICROBATCH_COST_TOKENS + cheapest[start + num_rows]
        best = len(costs) - 1 - int(np.argmin(costs[::-1]))  # the larger one of equals
        ends[start], cheapest[start] = start + num_rows[best], costs[best]
    cuts, start = [], 0
    while start < count:
        cuts.append(order[start : ends[start]])
        start = int(ends[start])
    return cuts


def plan_groups(
    lengths: np.ndarray,
    group_ids: np.ndarray,
    max_tokens: int,
    counts: np.ndarray | None = None,
    picture_tokens: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Plan like `plan`, but keep the rows of a group together, for losses that compare them. Positions, each exactly
    once.

    Groups with long rows first (equal ones in order of id); a micro-batch is filled while sequences x longest <=
    `max_tokens`, and has at least one group.
    """
    counts = np.ones(len(lengths), np.int64) if counts is None else counts
    picture_tokens = np.zeros(len(lengths), np.int64) if picture_tokens is None else picture_tokens
    groups, group_of = np.unique(group_ids, return_inverse=True)
    longest = np.zeros(len(groups), dtype=np.int64)
    np.maximum.at(longest, group_of, lengths)
    cuts: list[list[int]] = []
    widest = num_sequences = weight = 0
    for group in np.argsort(-longest, kind="stable").tolist():
        members = np.flatnonzero(group_of == group).tolist()
        more, heavier = int(counts[members].sum()), int(picture_tokens[members].sum())
        if cuts and (num_sequences + more) * widest + weight + heavier <= max_tokens:
            cuts[-1].extend(members)
            num_sequences, weight = num_sequences + more, weight + heavier
        else:
            cuts.append(members)
            widest, num_sequences, weight = max(1, int(longest[group])), more, heavier
    return [np.asarray(cut, dtype=np.int64) for cut in cuts]


def plan_packed(num_tokens: np.ndarray, max_tokens: int, group_ids: np.ndarray | None = None) -> list[np.ndarray]:
    """Choose which rows share a micro-batch without padding: positions, each exactly once. `num_tokens`: of each row;
    `group_ids`: of rows that must stay together, None: each may go alone.

    First fit, largest first (equal ones stay in order): at most 11/9 of the fewest micro-batches, and 2/3 more (Dósa
    2007). Tokens <= `max_tokens`; a row or group larger than that is a micro-batch of its own.
    """
    groups = np.arange(len(num_tokens)) if group_ids is None else np.unique(group_ids, return_inverse=True)[1]
    sizes = np.bincount(groups, weights=num_tokens).astype(np.int64)
    cuts: list[list[int]] = []
    room = np.zeros(len(sizes), np.int64)
    for group in np.argsort(-sizes, kind="stable").tolist():
        members = [group] if group_ids is None else np.flatnonzero(groups == group).tolist()
        fits = np.flatnonzero(room[: len(cuts)] >= sizes[group])
        if len(fits):
            cuts[fits[0]].extend(members)
            room[fits[0]] -= sizes[group]
        else:
            room[len(cuts)] = max_tokens - sizes[group]
            cuts.append(members)
    return [np.asarray(cut, dtype=np.int64) for cut in cuts]


def split_minibatches(group_ids: np.ndarray, all_groups: Sequence[int], num_minibatches: int) -> list[np.ndarray]:
    """Positions of this rank's rows for each optimizer step: whole groups, about equally many each, in ascending order
    of group id.

    `group_ids`: of this rank's rows. `all_groups`: ids over all ranks, in any order; every rank gets the same cut.
    With fewer groups than minibatches some are empty everywhere and left out.
    """
    if num_minibatches == 1:
        return [np.arange(len(group_ids))]
    shares = np.array_split(np.unique(np.asarray(all_groups, dtype=np.int64)), num_minibatches)
    return [np.flatnonzero(np.isin(group_ids, share)) for share in shares if len(share)]


def collate(
    rows: Rows,
    positions: np.ndarray,
    columns: Sequence[str] = (),
    *,
    packed: bool = False,
    shared: bool = False,
    reader: PictureReader | None = None,
) -> MicroBatch:
    """Make one micro-batch of the rows at these positions; `columns`: names of further columns to hand to the loss.
    `packed`: without padding, the longest sequence first. `shared`: as trees of each group's sequences, without records
    of experts and pictures. `reader`: of a vision model.

    Sample columns become float32 `[B]`; token columns `[B, T]`, float32 or int64, 0 in padding; those of candidates
    `[B, T, J]`. Rows with `target_ids`
    are scored for these, at temperature 1; T is then their largest number. Raises `DataError` for a token column that
    is not as long as the response, or records of experts that are not one a token.
    """
    sequences = sequences_of(rows, positions)
    if shared:
        layout = TokenLayout.trees(sequences.token_ids, rows.group_ids[positions][sequences.row_S])
    else:
        layout = TokenLayout.packed(sequences.token_ids) if packed else TokenLayout.padded(sequences.token_ids)
    place_N = layout.places(sequences.sequence_N, sequences.place_N)
    num_sampled_B = sequences.num_sampled_B
    width_response = max(1, int(num_sampled_B.max()))
    mask_BT = np.arange(width_response) < num_sampled_B[:, None]
    row_N, token_N = np.nonzero(mask_BT)
    ids_SL, targets_N = layout.ids_SL, sequences.targets_N
    lengths_S, starts_S = layout.lengths_S, layout.starts_S
    pictures = None if reader is None else pictures_of(rows, positions, lengths_S, starts_S, ids_SL.shape, reader)
    batch = MicroBatch(
        rows=np.asarray(positions),
        input_ids_SL=torch.from_numpy(ids_SL),
        positions_N=torch.from_numpy(layout.places(sequences.sequence_N, sequences.place_N - 1)),
        targets_N=torch.from_numpy(ids_SL.reshape(-1)[place_N] if targets_N is None else targets_N),
        targets_each=sequences.targets_each,
        slots_N=torch.from_numpy(row_N * width_response + token_N),
        mask_BT=torch.from_numpy(mask_BT),
        last_B=torch.from_numpy(place_N[np.cumsum(num_sampled_B) - 1] if len(place_N) else num_sampled_B),
        group_ids_B=torch.from_numpy(rows.group_ids[positions]),
        num_tokens=layout.num_tokens,
        num_shared=layout.num_shared,
        blocks=layout.blocks,
        experts_SLW=_experts(rows, positions, starts_S, lengths_S, ids_SL.size),
        pictures=pictures,
        **_temperatures(rows, positions),
    )
    for name in columns:
        batch.columns[name] = _column(rows, name, positions, mask_BT)
    if CANDIDATES in batch.columns:
        return replace(batch, candidates_NJ=batch.columns.pop(CANDIDATES)[batch.mask_BT])
    return batch


def dummy(
    device: torch.device | None = None, *, packed: bool = False, reader: PictureReader | None = None
) -> MicroBatch:
    """A micro-batch of one prompt and one response token that count for nothing: keeps a rank without rows in step with
    the others' collectives.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    ids_SL = torch.full((1, 2), PAD_ID)
    mask_BT = torch.zeros(1, 1, dtype=torch.bool)
    blocks = Blocks.of([2]) if packed else None
    pictures = None
    if reader is not None:
        pictures = place([[]], np.array([2]), np.array([0]), (1, 2), reader.merge, reader.blank)
    batch = MicroBatch(
        np.zeros(0, np.int64), ids_SL, zero, zero + PAD_ID, zero, mask_BT, zero, zero, blocks=blocks, pictures=pictures
    )
    return batch.to(device) if device else batch


def pad_plan(
    batches: list[MicroBatch],
    count: int,
    device: torch.device | None = None,
    *,
    packed: bool = False,
    reader: PictureReader | None = None,
) -> list[MicroBatch]:
    """The micro-batches, followed by dummies up to `count`, which is the largest number on any rank."""
    return batches + [dummy(device, packed=packed, reader=reader) for _ in range(count - len(batches))]


def split_rows(batch: MicroBatch, values_N: Tensor) -> list[np.ndarray]:
    """Split `[N]` values of the response tokens into a float32 `[T_i]` array for each row of the micro-batch."""
    bounds = batch.mask_BT.sum(dim=1).cumsum(0)[:-1].cpu().numpy()
    return np.split(values_N.detach().float().cpu().numpy(), bounds)


def _column(rows: Rows, name: str, positions: np.ndarray, mask_BT: np.ndarray) -> Tensor:
    if not _is_ragged(rows, name):
        return torch.from_numpy(rows.values(name)[positions].astype(np.float32))
    arrays, lengths = select(rows.arrays(name), positions), mask_BT.sum(axis=1).tolist()
    several = 0
    if name in CANDIDATE_COLUMNS:
        several = sum(map(len, arrays)) // max(1, sum(lengths)) or 1
    for position, array, length in zip(positions.tolist(), arrays, lengths, strict=True):
        if len(array) != length * (several or 1):
            what = "targets" if TARGETS in rows else "response tokens"
            raise DataError(
                f"row {rows.row_ids[position]}: column {name!r} has {len(array)} values for {length} {what}. A loss "
                "reads columns with one value for each of them or one a row."
            )
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
    shape = (*mask_BT.shape, several) if several else mask_BT.shape
    padded_BT = np.zeros(shape, dtype=np.float32 if np.issubdtype(values.dtype, np.floating) else np.int64)
    padded_BT[mask_BT] = values.reshape(-1, several) if several else values
    return torch.from_numpy(padded_BT)


def _temperatures(rows: Rows, positions: np.ndarray) -> dict[str, Any]:
    """Temperatures of the tokens: a single number where all have the same, as they mostly do; it costs nothing, and no
    bit changes."""
    if TARGETS in rows:
        return {"temperature": 1.0}
    if TEMPERATURES not in rows:
        return {}
    values_N = np.concatenate(select(rows.arrays(TEMPERATURES), positions))
    if len(values_N) == 0 or (values_N == values_N[0]).all():
        return {"temperature": float(values_N[0]) if len(values_N) else None}
    return {"temperatures_N": torch.from_numpy(values_N)}


def _experts(
    rows: Rows, positions: np.ndarray, starts_S: np.ndarray, lengths_S: np.ndarray, num_places: int
) -> Tensor | None:
    """Records of the engine's experts at the places of their tokens: all of a sequence but its last."""
    if ROUTED_EXPERTS not in rows:
        return None
    places = np.concatenate([start + np.arange(length - 1) for start, length in zip(starts_S, lengths_S, strict=True)])
    records = np.concatenate(select(rows.arrays(ROUTED_EXPERTS), positions))
    width, rest = divmod(len(records), len(places))
    if rest or not width:
        raise DataError(
            f"row {rows.row_ids[positions[0]]} and those with it: column {ROUTED_EXPERTS!r} has {len(records)} bytes "
            f"for {len(places)} tokens. It has a record of equal size for every token but the last of a sequence."
        )
    experts_SLW = np.full((num_places, width), UNREAD, np.int16)
    experts_SLW[places] = records.reshape(-1, width)
    return torch.from_numpy(experts_SLW)


def _is_ragged(rows: Rows, name: str) -> bool:
    import pyarrow as pa

    return pa.types.is_list(rows.table().schema.field(name).type)
