"""The index of values, (group, column, sample) -> place in a block, and the payload of a lease, gathered from it.

    BlockIndex ─ gather ─▶ Payload ─ call ─▶ assemble ─▶ Rows

A block holds the values of one write: an Arrow record batch, here or behind a reference that `BlockIndex` treats as
opaque. It is freed with the last of its cells. Small batches travel in the payload, cut down to the rows wanted; of
large ones only the reference does, and their consumer reads them from shared memory. `service/store.py` gathers,
`client/store_client.py` assembles.

Legend: K places, N rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute  # what `take` imports on its first call, a tenth of a second too late
from msgspec import Struct

from penstock.algorithms.graph.columns import Column
from penstock.store.data.codec import InlineBatch, SegmentRef, SentBatch
from penstock.store.data.rows import Rows
from penstock.store.data.schema import arrow_type, compact_blobs, is_blobs, offsets_of, take_rows
from penstock.store.errors import TooLarge, UnknownColumn
from penstock.store.ledger.group import Span, bits, spans_of

MAX_ENTRIES = 2**31 - 1
"""The most entries of a column with offsets in one batch: bytes of strings, values of lists."""


class ValueBlock:
    """A record batch, `batch` or behind `ref`, and how many of its cells are alive."""

    __slots__ = ("batch", "is_gone", "nbytes", "num_cells", "ref")

    def __init__(self, batch: pa.RecordBatch | None, ref: Any, nbytes: int) -> None:
        self.batch = batch
        self.ref = ref
        self.nbytes = nbytes
        self.num_cells = 0
        self.is_gone = False
        """True once what is behind `ref` cannot be had any more."""


class CellPlace(NamedTuple):
    """A place of values: the i-th is at `start + i * stride` of the block."""

    block: ValueBlock
    start: int
    stride: int
    """Step between values. 1: they were written side by side. 0: all are one value, which the source wrote for the
    group."""


Cells = CellPlace | list[CellPlace | None]
"""Places of one column of a group: one for all samples, or one for each."""


class BlockIndex:
    """All cells of the resident groups."""

    def __init__(
        self, columns: Sequence[Column], group_size: int, freed: Callable[[ValueBlock], None] = lambda block: None
    ) -> None:
        """Prepare an empty index. `freed`: called with each block whose last cell has gone."""
        self._columns, self._freed = columns, freed
        self._types = {column.name: arrow_type(column) for column in columns}
        self.group_size = group_size
        self._cells: dict[int, dict[str, Cells]] = {}
        self._living: set[ValueBlock] = set()
        self._referring: set[ValueBlock] = set()
        """Living blocks that are behind a reference."""
        self.bytes = 0
        """Bytes of blocks with a living cell."""

    def add_group(self, group_id: int, block: ValueBlock, position: int, names: Sequence[str]) -> None:
        """Add the source's columns of a new group: one value each, shared by its rows."""
        self._cells[group_id] = dict.fromkeys(names, CellPlace(block, position, 0))
        self._count(block, len(names))

    def add_rows(
        self, row_ids: Sequence[int], positions: Sequence[int], block: ValueBlock, names: Sequence[str]
    ) -> None:
        """Add cells of rows: row `row_ids[p]` is at `p` of the block, for p in `positions`. Cells already there
        stay."""
        kept = list(positions)
        added = 0
        rows = row_ids if len(kept) == len(row_ids) else [row_ids[position] for position in kept]
        for group_id, first, indices in spans_of(rows, self.group_size):
            group = self._cells[group_id]
            start = kept[first]
            side_by_side = kept[first + len(indices) - 1] == start + len(indices) - 1
            if len(indices) == self.group_size and side_by_side and group.keys().isdisjoint(names):
                group.update(dict.fromkeys(names, CellPlace(block, start, 1)))
                added += len(names)
                continue
            for offset, index in enumerate(indices):
                cell = CellPlace(block, kept[first + offset], 1)
                added += sum(self._add_cell(group, name, index, cell) for name in names)
        self._count(block, added)

    def _add_cell(self, group: dict[str, Cells], name: str, index: int, cell: CellPlace) -> bool:
        cells = group.get(name)
        if cells is None:
            cells = group[name] = [None] * self.group_size
        if isinstance(cells, CellPlace) or cells[index] is not None:
            return False
        cells[index] = cell
        return True

    def pin(self, block: ValueBlock) -> None:
        """Keep a block until `unpin`, whatever becomes of its cells."""
        self._count(block, 1)

    def unpin(self, block: ValueBlock) -> None:
        self._uncount(block)

    def free(self, group_id: int, mask: int) -> None:
        """Remove the cells of the mask's rows, which have ended."""
        if mask == (1 << self.group_size) - 1:
            for cells in self._cells.pop(group_id, {}).values():
                if isinstance(cells, CellPlace):
                    self._uncount(cells.block)
                else:
                    self._uncount_all(cells)
            return
        group = self._cells.get(group_id, {})
        for name in group:
            self._free_cells(group, name, mask)

    def clear(self, group_id: int, columns: Mapping[str, int]) -> None:
        """Remove each column from the samples of its mask. A column that the source wrote is removed from all."""
        group = self._cells.get(group_id, {})
        for name, mask in columns.items():
            cells = group.get(name)
            if isinstance(cells, CellPlace) and (not cells.stride or mask == (1 << self.group_size) - 1):
                del group[name]
                self._uncount(cells.block)
            elif cells is not None:
                self._free_cells(group, name, mask)
                if not any(group[name]):
                    del group[name]  # what is written for all of them at once is one place again

    def mark_gone(self, is_gone: Callable[[Any], bool]) -> None:
        """Mark the blocks behind these references, which cannot be had any more. Cells stay until they are cleared."""
        for block in self._referring:
            block.is_gone = block.is_gone or is_gone(block.ref)

    def lost_cells(self, num_rows: int = 2048) -> Iterator[dict[int, dict[str, int]]]:
        """Iterate over samples whose value is in a block that is gone: group -> column -> mask, of about so many rows
        at a time, perhaps none of these. In between anything may happen to the index."""
        num_groups = max(1, num_rows // self.group_size)
        if not any(block.is_gone for block in self._referring):
            return
        first, end = next(iter(self._cells), 0), next(reversed(self._cells), -1) + 1
        for start in range(first, end, num_groups):
            groups = range(start, min(end, start + num_groups))
            yield {group: gone for group in groups if (gone := self._lost_of(self._cells.get(group, {})))}

    def _lost_of(self, columns: dict[str, Cells]) -> dict[str, int]:
        lost = {}
        for name, cells in columns.items():
            if isinstance(cells, CellPlace):
                mask = (1 << self.group_size) - 1 if cells.block.is_gone else 0
            else:
                mask = sum(1 << i for i, cell in enumerate(cells) if cell is not None and cell.block.is_gone)
            if mask:
                lost[name] = mask
        return lost

    def _free_cells(self, group: dict[str, Cells], name: str, mask: int) -> None:
        """Remove these samples' cells, but for a value that the source wrote for the group."""
        cells = group[name]
        if isinstance(cells, CellPlace):
            if not cells.stride:
                return
            cells.block.num_cells += self.group_size - 1  # it counted as one
            cells = group[name] = [CellPlace(cells.block, cells.start + i, 1) for i in range(self.group_size)]
        ended = list(bits(mask))
        self._uncount_all([cells[index] for index in ended])
        for index in ended:
            cells[index] = None

    @property
    def num_blocks(self) -> int:
        return len(self._living)

    def new_copy(self) -> "BlockIndex":
        """Make an index for the same columns, which `copy_group` fills. Changes of either do not concern the other."""
        return BlockIndex(self._columns, self.group_size)

    def copy_group(self, group_id: int, copied: "BlockIndex") -> None:
        """Copy the cells of a group as they are; the values are shared, and stay until `release_copy`."""
        columns = self._cells[group_id]
        copied._cells[group_id] = kept = {
            name: cells if isinstance(cells, CellPlace) else list(cells) for name, cells in columns.items()
        }
        for block in _blocks_of(kept):
            self._count(block, 1)

    def release_copy(self, copied: "BlockIndex", num_groups: int) -> bool:
        """Free the cells of so many copied groups, which are not needed any more. Returns whether there are more."""
        for _ in range(min(num_groups, len(copied._cells))):
            _, kept = copied._cells.popitem()
            for block in _blocks_of(kept):
                self._uncount(block)
        return bool(copied._cells)

    def columns_of(self, row_ids: Sequence[int]) -> list[str]:
        """The columns that every one of the rows has, in the schema's order."""
        if not row_ids:
            return list(self._types)
        cells = [self._cells[row // self.group_size] for row in row_ids]
        return [
            name
            for name in self._types
            if all(_has(group, name, row % self.group_size) for group, row in zip(cells, row_ids, strict=True))
        ]

    def places(self, spans: Sequence[Span], name: str) -> "tuple[CellPlace | tuple[CellPlace, ...], ...]":
        """Places of the column in each span: see `place_of`."""
        cells, nothing, places = self._cells, dict[str, Cells](), list[CellPlace | tuple[CellPlace, ...]]()
        for group_id, _, indices in spans:
            place = cells.get(group_id, nothing).get(name)
            places.append(place if isinstance(place, CellPlace) else self.place_of(group_id, indices, name))
        return tuple(places)

    def place_of(self, group_id: int, indices: range, name: str) -> "CellPlace | tuple[CellPlace, ...]":
        """Find a column of these samples: one place of the whole group, or each sample's. Equal for columns that lie
        side by side. Raises `UnknownColumn` if one lacks it."""
        cells = self._cells.get(group_id, {}).get(name)
        if isinstance(cells, CellPlace):
            return cells
        some = tuple(cells[indices.start : indices.stop]) if cells is not None else (None,)
        if None in some:
            row = group_id * self.group_size + indices.start + some.index(None)
            raise UnknownColumn(
                f"row {row} has no column {name!r}. Ask for columns that some stage has written for it."
            )
        return some  # type: ignore[return-value]  # none of them is None

    def empty(self, names: Sequence[str]) -> pa.RecordBatch:
        """A batch of these columns without rows."""
        return pa.RecordBatch.from_arrays([pa.array([], type=self._types[name]) for name in names], names=list(names))

    def _count(self, block: ValueBlock, num_cells: int) -> None:
        if num_cells and not block.num_cells:
            self._living.add(block)
            if block.ref is not None:
                self._referring.add(block)
            self.bytes += block.nbytes
        block.num_cells += num_cells

    def _uncount(self, block: ValueBlock) -> None:
        block.num_cells -= 1
        if not block.num_cells:
            self._living.discard(block)
            self._referring.discard(block)
            self.bytes -= block.nbytes
            self._freed(block)

    def _uncount_all(self, cells: Sequence[CellPlace | None]) -> None:
        for cell in cells:
            if cell is not None:
                self._uncount(cell.block)


def _blocks_of(columns: dict[str, Cells]) -> set[ValueBlock]:
    found: set[ValueBlock] = set()
    for cells in columns.values():
        found.update(
            (cells.block,) if isinstance(cells, CellPlace) else [cell.block for cell in cells if cell is not None]
        )
    return found


def _has(group: dict[str, Cells], name: str, index: int) -> bool:
    cells = group.get(name)
    return cells is not None and (isinstance(cells, CellPlace) or cells[index] is not None)


Columns = tuple[list[str], np.ndarray]
"""Columns that lie side by side, and `[K, 4]` int64: source, start, stride and count of places one after the other."""


class Payload(Struct, array_like=True):
    """Rows of a lease: their sources and, by column, the places that one row after the other lies at."""

    row_ids: np.ndarray
    group_ids: np.ndarray
    sources: list[SentBatch] = []
    columns: list[Columns] = []

    @property
    def refs(self) -> list[SegmentRef]:
        """The sources that are elsewhere."""
        return [source for source in self.sources if not isinstance(source, InlineBatch)]

    def with_batches(self, fetched: Sequence[pa.RecordBatch]) -> "Payload":
        """Return the same rows without references: in place of each of `refs` the batch that was fetched for it."""
        found = iter(fetched)
        sources: list[SentBatch] = [
            source if isinstance(source, InlineBatch) else InlineBatch(next(found)) for source in self.sources
        ]
        return Payload(self.row_ids, self.group_ids, sources, self.columns)

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """Batches of the sources, of a payload without references."""
        return [source.batch for source in self.sources]  # type: ignore[union-attr]


def gather(blocks: BlockIndex, row_ids: Sequence[int], names: Sequence[str]) -> Payload:
    """Gather the columns `names` of the rows. Raises `UnknownColumn` if a row lacks one."""
    ids = np.asarray(row_ids, dtype=np.int64)
    payload = Payload(ids, ids // blocks.group_size)
    spans = spans_of(row_ids, blocks.group_size)
    side_by_side: dict[tuple[CellPlace | tuple[CellPlace, ...], ...], list[str]] = {}
    for name in names:
        side_by_side.setdefault(blocks.places(spans, name), []).append(name)
    numbers: dict[ValueBlock, int] = {}
    for found, together in side_by_side.items():
        places = _joined(spans, found)
        inline = [one for one in places if one[0].block.batch is not None]
        here, taken = len(payload.sources), 0
        if inline or not places:
            payload.sources.append(InlineBatch(_inline(blocks, inline, together)))
        if len(inline) == len(places) and all(place.stride for place, _ in inline):
            payload.columns.append((together, np.array([(here, 0, 1, len(ids))], np.int64)))
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
        payload.columns.append((together, np.array(table, np.int64)))
    return payload


def assemble(payload: Payload, names: Sequence[str]) -> Rows:
    """Put the rows of a payload without references together. Rows that lie together are read without a copy."""
    batches = payload.batches
    columns: dict[str, pa.Array] = {}
    for together, places in payload.columns:
        columns.update(zip(together, rows_at(batches, together, places).columns, strict=True))
    return Rows(payload.row_ids, payload.group_ids, pa.table([columns[name] for name in names], names=list(names)))


def by_value(payload: Payload) -> Payload:
    """Return the same rows of a payload without references, with no more of its batches than these rows and columns."""
    batches = payload.batches
    values = Payload(payload.row_ids, payload.group_ids)
    for number, (together, places) in enumerate(payload.columns):
        values.sources.append(InlineBatch(rows_at(batches, together, places, compact=True)))
        values.columns.append((together, np.array([(number, 0, 1, len(payload.row_ids))], np.int64)))
    return values


def _joined(spans: Sequence[Span], found: Sequence[CellPlace | tuple[CellPlace, ...]]) -> list[tuple[CellPlace, int]]:
    """Join places one after the other, each with its number of rows, into as few as can be."""
    joined: list[tuple[CellPlace, int]] = []
    block, start, stride, count = None, 0, 1, 0
    for (_, _, indices), cells in zip(spans, found, strict=True):
        each = (
            ((cells, indices.start, len(indices)),)
            if isinstance(cells, CellPlace)
            else [(cell, 0, 1) for cell in cells]
        )
        for place, skipped, more in each:
            first = place.start + skipped * place.stride
            if place.block is block and stride and place.stride and first == start + count:
                count += more
                continue
            if block is not None:
                joined.append((CellPlace(block, start, stride), count))
            block, start, stride, count = place.block, first, place.stride if more > 1 else 1, more
    if block is not None:
        joined.append((CellPlace(block, start, stride), count))
    return joined


def _inline(blocks: BlockIndex, places: list[tuple[CellPlace, int]], names: list[str]) -> pa.RecordBatch:
    """The values of places that are here, one after the other: no more of their batches than that, and what is one
    value for the rows of a group once."""
    if not places:
        return blocks.empty(names)
    numbers: dict[ValueBlock, int] = {}
    table: list[list[int]] = []
    ends = None
    for (block, start, stride), count in places:
        source, num_values = numbers.setdefault(block, len(numbers)), count if stride else 1
        if ends == (source, start):
            table[-1][3] += num_values
        else:
            table.append([source, start, 1, num_values])
        ends = source, start + num_values
    return rows_at([block.batch for block in numbers], names, np.array(table, np.int64), compact=True)


def rows_at(
    batches: Sequence[pa.RecordBatch], names: list[str], places: np.ndarray, *, compact: bool = False
) -> pa.RecordBatch:
    """The values at the places, in their order: a view where they lie side by side, or else a copy. `compact`: no view
    of a part of a batch, of which all would be sent. Raises `TooLarge`."""
    spans = places.tolist()
    if len(spans) == 1 and spans[0][2]:
        source, start, _, count = spans[0]
        batch = _selected(batches[source], names)
        if not compact or count == batch.num_rows:
            return batch.slice(start, count)
    _check_size(batches, names, places)
    parts: list[pa.RecordBatch] = []
    for source, some in groupby(spans, key=itemgetter(0)):
        batch, spots = _selected(batches[source], names), list(some)
        is_side_by_side = len(spans) > 1 and all(stride for _, _, stride, _ in spots)
        if is_side_by_side and (len(spots) == 1 or not _has_blobs(batch)):
            parts.extend(batch.slice(start, count) for _, start, _, count in spots)
        else:  # one call for all: it costs as much as many values
            rows = [start + stride * i for _, start, stride, count in spots for i in range(count)]
            parts.append(_taken(batch, pa.array(rows)))
    found = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    if compact and len(parts) > 1 and _has_blobs(found):
        found = pa.RecordBatch.from_arrays(list(map(compact_blobs, found.columns)), names=names)
    return found


def _selected(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    return batch if batch.schema.names == names else batch.select(names)


def _taken(batch: pa.RecordBatch, rows: pa.Array) -> pa.RecordBatch:
    if not _has_blobs(batch):
        return batch.take(rows)
    return pa.RecordBatch.from_arrays([take_rows(column, rows) for column in batch.columns], names=batch.schema.names)


def _has_blobs(batch: pa.RecordBatch) -> bool:
    return any(map(is_blobs, batch.schema.types))


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
        return offsets_of(column) if unit == "entries" else None if inner is None else inner[offsets_of(column)]
    return offsets_of(column) if unit == "bytes" and pa.types.is_string(column.type) else None
