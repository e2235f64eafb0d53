"""The payload of a lease: the places of the values of its rows, so that their reader puts them together.

    Blocks ─ gather ─▶ Payload ─ call ─▶ assemble ─▶ Rows

Small batches travel in the payload, cut down to the rows wanted; of large ones only the reference does, and their
consumer reads them from shared memory: they pass through no lease. `service/store.py` gathers, `client/client.py`
assembles.

Legend: K places, N rows.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute  # what `take` imports on its first call, a tenth of a second too late
from msgspec import Struct

from penstock.store.data.blobs import compact as compact_blobs
from penstock.store.data.blobs import is_blobs, take
from penstock.store.data.blocks import Block, Blocks, Place
from penstock.store.data.layout import Inline, Placed, SentBatch
from penstock.store.data.rows import Rows
from penstock.store.errors import TooLarge
from penstock.store.ledger.group import Span, spans_of

MAX_ENTRIES = 2**31 - 1
"""The most entries of a column with offsets in one batch: bytes of strings, values of lists."""

Columns = tuple[list[str], np.ndarray]
"""Columns that lie side by side, and `[K, 4]` int64: source, start, stride and count of places one after the other."""


class Payload(Struct, array_like=True):
    """Rows of a lease: their sources and, by column, the places that one row after the other lies at."""

    row_ids: np.ndarray
    group_ids: np.ndarray
    sources: list[SentBatch] = []
    columns: list[Columns] = []

    @property
    def refs(self) -> list[Placed]:
        """The sources that are elsewhere."""
        return [source for source in self.sources if not isinstance(source, Inline)]

    def with_batches(self, fetched: Sequence[pa.RecordBatch]) -> "Payload":
        """Return the same rows without references: for each the batch that was fetched for it."""
        return Payload(self.row_ids, self.group_ids, list(map(Inline, self.batches(fetched))), self.columns)

    def batches(self, fetched: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Return the batches of the sources, each of `refs` by what was fetched for it."""
        found = iter(fetched)
        return [source.batch if isinstance(source, Inline) else next(found) for source in self.sources]


def gather(blocks: Blocks, row_ids: Sequence[int], names: Sequence[str]) -> Payload:
    """Gather the columns `names` of the rows. Raises `UnknownColumn` if a row lacks one."""
    ids = np.asarray(row_ids, dtype=np.int64)
    payload = Payload(ids, ids // blocks.group_size)
    spans = spans_of(row_ids, blocks.group_size)
    side_by_side: dict[tuple[Place | tuple[Place, ...], ...], list[str]] = {}
    for name in names:
        side_by_side.setdefault(blocks.places(spans, name), []).append(name)
    numbers: dict[Block, int] = {}
    for found, together in side_by_side.items():
        places = _joined(spans, found)
        inline = [one for one in places if one[0].block.batch is not None]
        here, taken = len(payload.sources), 0
        if inline or not places:
            payload.sources.append(Inline(_inline(blocks, inline, together)))
        if len(inline) == len(places) and all(place.stride for place, _ in inline):
            payload.columns.append((together, _table([(here, 0, 1, len(ids))])))
            continue
        table = []
        for place, count in places:
            if place.block.batch is not None:
                table.append((here, taken, place.stride, count))
                taken += count if place.stride else 1
                continue
            if place.block not in numbers:
                numbers[place.block] = len(payload.sources)
                payload.sources.append(place.block.ref)
            table.append((numbers[place.block], place.start, place.stride, count))
        payload.columns.append((together, _table(table)))
    return payload


def assemble(payload: Payload, names: Sequence[str], fetched: Sequence[pa.RecordBatch]) -> Rows:
    """Put the rows of a payload together; `fetched`: the batches behind its `refs`. Rows that lie together are read
    without a copy."""
    batches = payload.batches(fetched)
    columns: dict[str, pa.Array] = {}
    for together, places in payload.columns:
        columns.update(zip(together, rows_at(batches, together, places).columns, strict=True))
    return Rows(payload.row_ids, payload.group_ids, pa.table([columns[name] for name in names], names=list(names)))


def by_value(payload: Payload, fetched: Sequence[pa.RecordBatch]) -> Payload:
    """Return the same rows without references: of each batch behind one, those rows and columns that are wanted."""
    batches = payload.batches(fetched)
    values = Payload(payload.row_ids, payload.group_ids)
    for number, (together, places) in enumerate(payload.columns):
        values.sources.append(Inline(rows_at(batches, together, places, compact=True)))
        values.columns.append((together, _table([(number, 0, 1, len(payload.row_ids))])))
    return values


def _joined(spans: Sequence[Span], found: Sequence[Place | tuple[Place, ...]]) -> list[tuple[Place, int]]:
    """Join places one after the other, each with its number of rows, into as few as can be."""
    joined: list[tuple[Place, int]] = []
    block, start, stride, count = None, 0, 1, 0
    for (_, _, indices), cells in zip(spans, found, strict=True):
        each = ((cells, indices.start, len(indices)),) if isinstance(cells, Place) else [(cell, 0, 1) for cell in cells]
        for place, skipped, more in each:
            first = place.start + skipped * place.stride
            if place.block is block and stride and place.stride and first == start + count:
                count += more
                continue
            if block is not None:
                joined.append((Place(block, start, stride), count))
            block, start, stride, count = place.block, first, place.stride if more > 1 else 1, more
    if block is not None:
        joined.append((Place(block, start, stride), count))
    return joined


def _inline(blocks: Blocks, places: list[tuple[Place, int]], names: list[str]) -> pa.RecordBatch:
    """The values of places that are here, one after the other: no more of their batches than that, and what is one
    value for the rows of a group once."""
    if not places:
        return blocks.empty(names)
    numbers: dict[Block, int] = {}
    table: list[list[int]] = []
    ends = None
    for (block, start, stride), count in places:
        source, num_values = numbers.setdefault(block, len(numbers)), count if stride else 1
        if ends == (source, start):
            table[-1][3] += num_values
        else:
            table.append([source, start, 1, num_values])
        ends = source, start + num_values
    return rows_at([block.batch for block in numbers], names, _table(table), compact=True)


def _check_size(batches: Sequence[pa.RecordBatch], names: list[str], places: np.ndarray) -> None:
    """Raise `TooLarge` for columns that are too large. Arrow counts the entries of a ragged column and the bytes of
    strings with 32 bits, and not all of it looks."""
    sizes = {source: batches[source].nbytes for source in set(places[:, 0].tolist())}
    copied = places[places[:, 2] == 0]
    most = sum(sizes.values()) + sum(sizes[source] * count for source, _, _, count in copied.tolist())
    if 8 * most <= MAX_ENTRIES:  # a byte has one entry, or eight bits
        return
    for name, unit in [(name, unit) for name in names for unit in ("entries", "bytes")]:
        there = [(_ends(batches[source].column(name), unit), places[places[:, 0] == source]) for source in sizes]
        entries = sum(_entries(ends, spots) for ends, spots in there if ends is not None)
        if entries > MAX_ENTRIES:
            raise TooLarge(
                f"column {name!r} of these {places[:, 3].sum()} rows has {entries} {unit} together, and a read has at "
                f"most {MAX_ENTRIES}. Lease fewer rows at a time; or write values that large to files, and their "
                "paths into the column."
            )


def _entries(ends: np.ndarray, places: np.ndarray) -> int:
    """Number of entries, or of bytes, that the values at these places have."""
    _, start, stride, count = places.T.astype(np.int64)
    each = ends[start + np.where(stride, count, 1)].astype(np.int64) - ends[start]
    return int((each * np.where(stride, 1, count)).sum())


def _ends(column: pa.Array, unit: str) -> np.ndarray | None:
    """Bounds of each value of a column: `[N + 1]`, in entries of lists or in bytes of strings, those in lists too. None
    if it has none of these."""
    if pa.types.is_list(column.type):
        inner = _ends(column.values, unit)
        return _offsets(column) if unit == "entries" else None if inner is None else inner[_offsets(column)]
    return _offsets(column) if unit == "bytes" and pa.types.is_string(column.type) else None


def _offsets(column: pa.Array) -> np.ndarray:
    """Offsets of a column: `[N + 1]`."""
    offsets = column.buffers()[1]
    ends = np.frombuffer(offsets, np.int32) if offsets is not None else np.zeros(1, np.int32)
    return ends[column.offset : column.offset + len(column) + 1]


def _table(places: Sequence[Sequence[int]]) -> np.ndarray:
    return np.asarray(places, dtype=np.int64)


def rows_at(
    batches: Sequence[pa.RecordBatch], names: list[str], places: np.ndarray, *, compact: bool = False
) -> pa.RecordBatch:
    """The values at the places, in their order: a view where they lie side by side, or else a copy. `compact`: no view
    of a part of a batch, of which all would be sent. Raises `TooLarge`."""
    _check_size(batches, names, places)
    parts: list[pa.RecordBatch] = []
    for source, there in groupby(places.tolist(), key=lambda place: place[0]):
        batch = batches[source]
        if batch.schema.names != names:
            batch = batch.select(names)
        spots = [(start, stride, count) for _, start, stride, count in there]
        is_part = len(places) == 1 and spots[0][2] < batch.num_rows
        is_side_by_side = all(stride for _, stride, _ in spots) and not (compact and is_part)
        if is_side_by_side and (len(spots) == 1 or not _has_blobs(batch)):
            parts.extend(batch.slice(start, count) for start, _, count in spots)
        else:  # one call for all: it costs as much as many values
            rows = [start + stride * i for start, stride, count in spots for i in range(count)]
            parts.append(_taken(batch, pa.array(rows)))
    found = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    if compact and len(parts) > 1 and _has_blobs(found):
        found = pa.RecordBatch.from_arrays(list(map(compact_blobs, found.columns)), names=names)
    return found


def _taken(batch: pa.RecordBatch, rows: pa.Array) -> pa.RecordBatch:
    if not _has_blobs(batch):
        return batch.take(rows)
    return pa.RecordBatch.from_arrays([take(column, rows) for column in batch.columns], names=batch.schema.names)


def _has_blobs(batch: pa.RecordBatch) -> bool:
    return any(map(is_blobs, batch.schema.types))
