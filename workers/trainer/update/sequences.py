"""The sequences that a model reads for a row, and the places of sampled tokens in them. Pure.

    prompt and response   one sequence: prompt_ids response_ids
    a trajectory          one for each segment: its runs of context and of sampled tokens (`spans`), one after the other

    with targets          one: prompt_ids, read to the end; `target_ids` are scored, K after each of its tokens

In the first two, `response_ids` has all sampled tokens of the row in their order, and everything that has one value a
token has one for each of these; with targets, one for each target. So a row is one row in every sum and mean, however
many sequences it takes to compute it.

A trajectory may outlast the bound of staleness: its first turns were sampled under versions that are more than
`max_staleness` behind by the time it is trained. With `environment.old_turns=context` those turns are read as context,
like the environment's messages, and the others are trained (`without_old_turns`).

Legend: B rows, S sequences, S_i those of row i, N sampled tokens of all rows.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from penstock.algorithms.graph.columns import ROUTED_EXPERTS, SEEN_PICTURES, SEQUENCE_COLUMNS
from penstock.conf.errors import DataError
from penstock.store.data.rows import Rows

SPANS, TURN_TOKENS = "spans", "turn_tokens"
TARGETS = "target_ids"
"""Column of tokens to be scored after each token of `prompt_ids`, `[T * K]` int64: K after the first, and so on."""
TEMPERATURES = "token_temperatures"
SEEN, SEEN_RANGES = SEEN_PICTURES
"""Columns of a trajectory's pictures. One that is not read any more has the length 0."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of some rows, in their order."""

    token_ids: list[np.ndarray]
    """Token ids, `[L_s]` for each sequence."""
    num_sampled_B: np.ndarray
    """Sampled tokens of each row."""
    sequence_N: np.ndarray
    """The sequence in which each sampled token stands, row by row."""
    place_N: np.ndarray
    """Place of each sampled token in its sequence; the token one place before predicts it."""
    row_S: np.ndarray
    """Row of each sequence."""
    targets_N: np.ndarray | None = None
    """Tokens to be scored in the place of the sampled ones; None: those are."""
    targets_each: int = 1
    """Number of targets of each place, side by side; 1 also where rows differ in it."""


class Shapes(NamedTuple):
    """The sizes of rows, `[rows]` int64 each."""

    longest: np.ndarray
    """Tokens of the longest sequence of each row."""
    num_sequences: np.ndarray
    num_tokens: np.ndarray
    """Tokens of all its sequences."""


def are_trajectories(rows: Rows) -> bool:
    return SPANS in rows


def context_column(rows: Rows) -> str:
    """The column that holds the tokens that were not sampled."""
    return SEQUENCE_COLUMNS[0] if are_trajectories(rows) else "prompt_ids"


def shapes_of(rows: Rows) -> Shapes:
    """Sizes of the rows. Raises `DataError` for a row of which something is sampled without a prompt."""
    ones = np.ones(len(rows), np.int64)
    if not are_trajectories(rows):
        prompts = rows.lengths("prompt_ids")
        if len(prompts) and prompts.min() == 0:
            raise _without_prompt(rows, int(prompts.argmin()))
        lengths = prompts + rows.lengths("response_ids")
        return Shapes(lengths, ones, lengths)
    shapes = Shapes(ones, ones.copy(), ones.copy())
    for position, spans in enumerate(rows.arrays(SPANS)):
        if len(spans):
            table, starts = _table(spans)
            if (table[starts, 1] == 0).any():
                raise _without_prompt(rows, position)
            lengths = np.add.reduceat(table[:, 1] + table[:, 2], starts)
            for of_rows, value in zip(shapes, (lengths.max(), len(lengths), lengths.sum()), strict=True):
                of_rows[position] = value
    return shapes


def sequences_of(rows: Rows, positions: np.ndarray) -> Sequences:
    """Sequences of the rows at these positions."""
    responses = select(rows.arrays("response_ids"), positions)
    contexts = select(rows.arrays(context_column(rows)), positions)
    num_sampled_B = np.array([len(ids) for ids in responses], dtype=np.int64)
    if TARGETS in rows:
        return _with_targets(rows, positions, contexts)
    if not are_trajectories(rows):
        num_prompt = np.array([len(ids) for ids in contexts], dtype=np.int64)
        row_N = np.repeat(np.arange(len(positions)), num_sampled_B)
        first_N = np.repeat(np.cumsum(num_sampled_B) - num_sampled_B, num_sampled_B)
        token_ids = [np.concatenate(pair) for pair in zip(contexts, responses, strict=True)]
        place_N = num_prompt[row_N] + np.arange(len(row_N)) - first_N
        return Sequences(token_ids, num_sampled_B, row_N, place_N, np.arange(len(positions)))
    token_ids, sequences, places = [], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    row_S: list[int] = []
    spans_B = select(rows.arrays(SPANS), positions)
    for row, (context, response, spans) in enumerate(zip(contexts, responses, spans_B, strict=True)):
        for ids, sampled in _segments(context, response, spans):
            sequences.append(np.full(len(sampled), len(token_ids), np.int64))
            places.append(sampled)
            token_ids.append(ids)
            row_S.append(row)
    all_sequences, all_places = np.concatenate(sequences), np.concatenate(places)
    return Sequences(token_ids, num_sampled_B, all_sequences, all_places, np.asarray(row_S, np.int64))


def _with_targets(rows: Rows, positions: np.ndarray, contexts: list[np.ndarray]) -> Sequences:
    """Sequences of rows that say themselves what is to be scored. Raises `DataError` for targets that are not as many
    after each token."""
    targets = select(rows.arrays(TARGETS), positions)
    places, numbers = [], set()
    for position, context, of_row in zip(positions.tolist(), contexts, targets, strict=True):
        if len(of_row) % len(context):
            raise DataError(
                f"row {rows.row_ids[position]} has {len(of_row)} targets for {len(context)} tokens. Give as many after "
                "each of them."
            )
        numbers.add(len(of_row) // len(context))
        places.append(np.repeat(np.arange(1, len(context) + 1), len(of_row) // len(context)))
    num_targets_B = np.array([len(of_row) for of_row in targets], np.int64)
    row_N = np.repeat(np.arange(len(positions)), num_targets_B)
    targets_N = np.concatenate(targets).astype(np.int64)
    each = numbers.pop() if len(numbers) == 1 else 1
    rows_S, place_N = np.arange(len(positions)), np.concatenate(places)
    return Sequences(contexts, num_targets_B, row_N, place_N, rows_S, targets_N, max(1, each))


def without_old_turns(rows: Rows, oldest: int, token_columns: Collection[str]) -> Rows:
    """The rows, with turns that have a token of a version before `oldest` as context. `token_columns`: names of columns
    with one value a sampled token; those that the rows have are cut alike. In `turn_tokens` such a turn has none."""
    versions = rows.arrays("token_versions")
    if not any(len(one) and one.min() < oldest for one in versions):
        return rows
    names = [name for name in rows.names if name in token_columns]
    records, places, turns = ([name] if name in rows else [] for name in (ROUTED_EXPERTS, SEEN_RANGES, TURN_TOKENS))
    cut: dict[str, list[np.ndarray]] = {name: [] for name in (*names, *records, *places, *turns, "context_ids", SPANS)}
    arrays = {name: rows.arrays(name) for name in cut}
    for index, of_row in enumerate(versions):
        context, spans, kept = _demote_old_turns(
            arrays["context_ids"][index], arrays["response_ids"][index], arrays[SPANS][index], of_row, oldest
        )
        cut["context_ids"].append(context)
        cut[SPANS].append(spans)
        for name in names:
            cut[name].append(arrays[name][index][kept])
        for name in records:
            is_read = _reads_record(arrays[SPANS][index], kept)
            cut[name].append(arrays[name][index].reshape(len(is_read), -1)[is_read].reshape(-1))
        for name in places:
            cut[name].append(_remaining_pictures(arrays[name][index], arrays[SPANS][index], kept))
        for name in turns:
            starts = [sampled.start for _, _, sampled in _turns(arrays[SPANS][index])]
            cut[name].append(arrays[name][index] * kept[starts])
    for name, values in cut.items():
        rows = rows.with_column(name, values)
    return rows


def oldest_versions(rows: Rows) -> list[np.ndarray]:
    """The oldest version of each sampled token and those before it in its turn, `[T_i]` for each row. An engine that
    keeps its caches when weights change samples a token with keys and values of all of them; a turn reads all that is
    before it under its first token's version."""
    versions = rows.arrays("token_versions")
    if not are_trajectories(rows):
        return [np.minimum.accumulate(of_row) for of_row in versions]
    return [
        np.concatenate([of_row[:0], *(np.minimum.accumulate(of_row[sampled]) for _, _, sampled in _turns(spans))])
        for of_row, spans in zip(versions, rows.arrays(SPANS), strict=True)
    ]


def _turns(spans: np.ndarray) -> Iterator[tuple[int, slice, slice]]:
    """The turns of one row: segment, and where its context and its sampled tokens lie in the row's columns.

    >>> list(_turns(np.array([0, 3, 2, 1, 4, 1])))
    [(0, slice(0, 3, None), slice(0, 2, None)), (1, slice(3, 7, None), slice(2, 3, None))]
    """
    context_end = sampled_end = 0
    for segment, num_context, num_sampled in spans.reshape(-1, 3).tolist():
        context = slice(context_end, context_end + num_context)
        sampled = slice(sampled_end, sampled_end + num_sampled)
        context_end, sampled_end = context.stop, sampled.stop
        yield segment, context, sampled


def _segments(context: np.ndarray, response: np.ndarray, spans: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids of each segment of a trajectory, and the places of what was sampled in it."""
    segments = []
    for _, turns in groupby(_turns(spans), key=itemgetter(0)):
        parts, places, length = [], [], 0
        for _, read, sampled in turns:
            parts += [context[read], response[sampled]]
            first = length + len(parts[-2])
            length = first + len(parts[-1])
            places.append(np.arange(first, length))
        segments.append((np.concatenate(parts), np.concatenate(places)))
    return segments


def _table(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The spans as `[runs, 3]`, and the first run of each segment."""
    table = spans.reshape(-1, 3).astype(np.int64)
    return table, np.flatnonzero(np.diff(table[:, 0], prepend=-1))


def _without_prompt(rows: Rows, position: int) -> DataError:
    return DataError(
        f"row {rows.row_ids[position]} has an empty prompt: nothing predicts its first response token. "
        "Give it at least one token (data.prompt_template)."
    )


def select(arrays: Sequence[np.ndarray], positions: np.ndarray) -> list[np.ndarray]:
    """The arrays at these positions."""
    return [arrays[position] for position in positions.tolist()]


def _demote_old_turns(
    context: np.ndarray, response: np.ndarray, spans: np.ndarray, versions: np.ndarray, oldest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Context and spans of one row without its old turns, and a bool for each of its sampled tokens: whether it is
    left. What follows the last turn of a segment that is left, and segments of which none is, are not read."""
    contexts, runs, kept = [np.zeros(0, context.dtype)], [], np.zeros(len(response), bool)
    num_segments = 0
    for _, turns in groupby(_turns(spans), key=itemgetter(0)):
        pending: list[np.ndarray] = []  # context of the next turn that is left
        is_new = True
        for _, read, sampled in turns:
            pending.append(context[read])
            if versions[sampled].min() < oldest:
                pending.append(response[sampled])
                continue
            num_segments, is_new = num_segments + is_new, False
            runs += [num_segments - 1, sum(map(len, pending)), sampled.stop - sampled.start]
            contexts += pending
            pending, kept[sampled] = [], True
    return np.concatenate(contexts), np.asarray(runs, spans.dtype), kept


def _reads_record(spans: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """A bool for each token of one row but the last of each segment: whether it is read without the old turns. `kept`:
    whether each sampled token is left."""
    lengths, read = _lengths(spans, kept)
    parts = [np.arange(length - 1) < of_it - 1 for length, of_it in zip(lengths.tolist(), read.tolist(), strict=True)]
    return np.concatenate([np.zeros(0, bool), *parts])


def _remaining_pictures(ranges: np.ndarray, spans: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Segments and places of one row's pictures without the old turns."""
    _, read = _lengths(spans, kept)
    table = ranges.reshape(-1, 3).copy()
    is_seen = table[:, 1] < read[table[:, 0]]
    table[:, 0] = (np.cumsum(read > 0) - 1)[table[:, 0]]
    table[~is_seen] = 0
    return table.reshape(-1)


def _lengths(spans: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each segment of one row, and of those the ones that are read without the old turns: up to its last turn
    that is left."""
    lengths, num_read = [], []
    for _, turns in groupby(_turns(spans), key=itemgetter(0)):
        length = read = 0
        for _, context, sampled in turns:
            length += context.stop - context.start + sampled.stop - sampled.start
            read = length if kept[sampled.stop - 1] else read
        lengths.append(length)
        num_read.append(read)
    return np.array(lengths, np.int64), np.array(num_read, np.int64)
