"""Where the values are: (row, column) -> (block, position). The index of the data plane.

A block is what one write brought: an Arrow record batch, here or behind a reference that this file treats as opaque.
It goes with the last of its cells. `service/store.py` gathers; `client/client.py` assembles what was gathered, so that
large columns are read by their consumer from shared memory and pass through no lease.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute  # what `take` imports on its first call, a tenth of a second too late

from penstock.algorithms.graph.columns import Column
from penstock.store.data.rows import Rows
from penstock.store.data.schema import arrow_type
from penstock.store.errors import UnknownColumn
from penstock.store.ledger.group import bits, spans_of


class Block:
    """One record batch, `batch` or behind `ref`, and how many of its cells are alive."""

    __slots__ = ("batch", "nbytes", "num_cells", "ref")

    def __init__(self, batch: pa.RecordBatch | None, ref: Any, nbytes: int) -> None:
        self.batch = batch
        self.ref = ref
        self.nbytes = nbytes
        self.num_cells = 0


Cell = tuple[Block, int]


class Run:
    """The cells of a whole group in one column: sample i is at `start + i * stride` of the block. One object stands for
    all columns that were written together."""

    __slots__ = ("block", "start", "stride")

    def __init__(self, block: Block, start: int, stride: int) -> None:
        self.block = block
        self.start = start
        self.stride = stride
        """0 for what the source wrote: one value for all samples."""

    def cell(self, index: int) -> Cell:
        return self.block, self.start + index * self.stride

    def positions(self, indices: range) -> Iterable[int]:
        if self.stride:
            return range(self.start + indices.start, self.start + indices.stop)
        return [self.start] * len(indices)


Cells = Run | list[Cell | None]
GroupCells = dict[str, Cells]
"""By column: one run for all rows of the group, or a cell for each."""
Span = tuple[int, int, range]
"""Of rows that are gathered: group, position of the first, and which samples."""


@dataclass
class Part:
    """Some rows: all of `batch`, or if that is None, those at `positions` of `refs[ref]`."""

    batch: pa.RecordBatch | None
    ref: int
    positions: np.ndarray


@dataclass
class ColumnSet:
    """Columns whose cells lie side by side: the parts one after the other, permuted by `order`, are the rows."""

    names: list[str]
    parts: list[Part]
    order: np.ndarray | None


@dataclass
class Payload:
    """What a lease sends: inline data, references, and the recipe to put the rows together."""

    row_ids: np.ndarray
    group_ids: np.ndarray
    sets: list[ColumnSet] = field(default_factory=list)
    refs: list[Any] = field(default_factory=list)


class Blocks:
    """All cells of the resident groups."""

    def __init__(
        self, columns: Sequence[Column], group_size: int, let_go: Callable[[Block], None] = lambda block: None
    ) -> None:
        """`let_go`: called with each block whose last cell has gone."""
        self._let_go = let_go
        self._types = {column.name: arrow_type(column) for column in columns}
        self._size = group_size
        self._cells: dict[int, GroupCells] = {}
        self._living: set[Block] = set()
        self.bytes = 0
        """Of blocks with a living cell."""

    def add_group(self, group_id: int, block: Block, position: int, names: Sequence[str]) -> None:
        """The source's columns of a new group: one value each, shared by its rows."""
        self._cells[group_id] = dict.fromkeys(names, Run(block, position, 0))
        self._count(block, len(names))

    def add_rows(self, row_ids: Sequence[int], positions: Sequence[int], block: Block, names: Sequence[str]) -> None:
        """Row `row_ids[p]` of the columns is at `p` of the block, for p in `positions`. Cells already there stay."""
        kept = list(positions)
        added = 0
        for group_id, first, indices in spans_of([row_ids[position] for position in kept], self._size):
            group = self._cells[group_id]
            start = kept[first]
            side_by_side = kept[first + len(indices) - 1] == start + len(indices) - 1
            if len(indices) == self._size and side_by_side and group.keys().isdisjoint(names):
                group.update(dict.fromkeys(names, Run(block, start, 1)))
                added += len(names)
                continue
            for offset, index in enumerate(indices):
                cell = (block, kept[first + offset])
                added += sum(self._add_cell(group, name, index, cell) for name in names)
        self._count(block, added)

    def _add_cell(self, group: GroupCells, name: str, index: int, cell: Cell) -> bool:
        cells = group.get(name)
        if cells is None:
            cells = group[name] = [None] * self._size
        if isinstance(cells, Run) or cells[index] is not None:
            return False
        cells[index] = cell
        return True

    def pin(self, block: Block) -> None:
        """It stays until `unpin`, whatever becomes of its cells."""
        self._count(block, 1)

    def unpin(self, block: Block) -> None:
        self._uncount(block)

    def free(self, group_id: int, mask: int) -> None:
        """The rows of the mask have ended."""
        if mask == (1 << self._size) - 1:
            for cells in self._cells.pop(group_id, {}).values():
                if isinstance(cells, Run):
                    self._uncount(cells.block)
                else:
                    self._uncount_all(cells)
            return
        group = self._cells.get(group_id, {})
        for name, cells in group.items():
            if isinstance(cells, Run):
                if not cells.stride:
                    continue
                cells.block.num_cells += self._size - 1  # it counted as one
                cells = group[name] = [cells.cell(index) for index in range(self._size)]
            ended = list(bits(mask))
            self._uncount_all([cells[index] for index in ended])
            for index in ended:
                cells[index] = None

    @property
    def num_blocks(self) -> int:
        return len(self._living)

    def refs(self) -> list[Any]:
        """References of the blocks that are not here."""
        return [block.ref for block in self._living if block.ref is not None]

    def copy(self) -> "Blocks":
        """The same cells at this moment; the values are shared. What happens to either index does not concern the
        other.
        """
        copied = Blocks.__new__(Blocks)
        copied._types, copied._size, copied._let_go = self._types, self._size, self._let_go
        copied._living, copied.bytes = set(self._living), self.bytes
        copied._cells = {
            group: {name: cells if isinstance(cells, Run) else list(cells) for name, cells in columns.items()}
            for group, columns in self._cells.items()
        }
        return copied

    def gather(self, row_ids: Sequence[int], names: Sequence[str]) -> Payload:
        """The columns `names` of the rows. Raises `UnknownColumn` if a row lacks one."""
        ids = np.asarray(row_ids, dtype=np.int64)
        payload = Payload(ids, ids // self._size)
        if not len(row_ids):
            empty = pa.RecordBatch.from_arrays(
                [pa.array([], type=self._types[name]) for name in names], names=list(names)
            )
            payload.sets.append(ColumnSet(list(names), [Part(empty, 0, ids)], None))
            return payload
        spans = spans_of(row_ids, self._size)
        side_by_side: dict[tuple[Any, ...], list[str]] = {}
        for name in names:
            side_by_side.setdefault(tuple(self._found(span, name) for span in spans), []).append(name)
        known_refs: dict[int, int] = {}
        for found, together in side_by_side.items():
            payload.sets.append(_column_set(together, spans, found, payload.refs, known_refs))
        return payload

    def columns_of(self, row_ids: Sequence[int]) -> list[str]:
        """The columns that every one of the rows has, in the schema's order."""
        if not row_ids:
            return list(self._types)
        cells = [self._cells[row // self._size] for row in row_ids]
        return [
            name
            for name in self._types
            if all(_has(group, name, row % self._size) for group, row in zip(cells, row_ids, strict=True))
        ]

    def _found(self, span: Span, name: str) -> Run | tuple[Cell, ...]:
        """Where a column of some rows is. Equal for columns that lie side by side."""
        group_id, _, indices = span
        cells = self._cells.get(group_id, {}).get(name)
        if isinstance(cells, Run):
            return cells
        some = tuple(cells[indices.start : indices.stop]) if cells is not None else (None,)
        if None in some:
            row = group_id * self._size + indices.start + some.index(None)
            raise UnknownColumn(
                f"row {row} has no column {name!r}. Ask for columns that some stage has written for it."
            )
        return some  # type: ignore[return-value]  # none of them is None

    def _count(self, block: Block, num_cells: int) -> None:
        if num_cells and not block.num_cells:
            self._living.add(block)
            self.bytes += block.nbytes
        block.num_cells += num_cells

    def _uncount(self, block: Block) -> None:
        block.num_cells -= 1
        if not block.num_cells:
            self._living.discard(block)
            self.bytes -= block.nbytes
            self._let_go(block)

    def _uncount_all(self, cells: Sequence[Cell | None]) -> None:
        for cell in cells:
            if cell is not None:
                self._uncount(cell[0])


def _has(group: GroupCells, name: str, index: int) -> bool:
    cells = group.get(name)
    return cells is not None and (isinstance(cells, Run) or cells[index] is not None)


@dataclass
class _Chosen:
    """Rows wanted of one block: where they are in it, and where they go."""

    block: Block
    positions: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


def _column_set(
    names: list[str],
    spans: Sequence[Span],
    found: Sequence[Run | tuple[Cell, ...]],
    refs: list[Any],
    known_refs: dict[int, int],
) -> ColumnSet:
    """Group the cells by block. Inline blocks are cut down to the rows wanted and joined; references are passed on."""
    inline: list[pa.RecordBatch] = []
    parts: list[Part] = []
    inline_places: list[int] = []
    ref_places: list[int] = []
    chosen = _by_block(spans, found)
    for one in chosen:
        if one.block.batch is not None:
            batch = one.block.batch if one.block.batch.schema.names == names else one.block.batch.select(names)
            inline.append(_cut(batch, np.asarray(one.positions)))
            inline_places.extend(one.places)
        else:
            number = known_refs.setdefault(id(one.block), len(refs))
            if number == len(refs):
                refs.append(one.block.ref)
            parts.append(Part(None, number, np.asarray(one.positions, dtype=np.int64)))
            ref_places.extend(one.places)
    if inline:
        joined = inline[0] if len(inline) == 1 else pa.concat_batches(inline)
        parts.insert(0, Part(joined, 0, np.arange(joined.num_rows)))
    return ColumnSet(names, parts, _order(inline_places + ref_places) if len(chosen) > 1 else None)


def _by_block(spans: Sequence[Span], found: Sequence[Run | tuple[Cell, ...]]) -> list[_Chosen]:
    by_block: dict[Block, _Chosen] = {}
    for (_, place, indices), cells in zip(spans, found, strict=True):
        if isinstance(cells, Run):
            one = by_block.get(cells.block) or by_block.setdefault(cells.block, _Chosen(cells.block))
            one.positions.extend(cells.positions(indices))
            one.places.extend(range(place, place + len(indices)))
            continue
        for offset, (block, position) in enumerate(cells):
            one = by_block.get(block) or by_block.setdefault(block, _Chosen(block))
            one.positions.append(position)
            one.places.append(place + offset)
    return list(by_block.values())


def _cut(batch: pa.RecordBatch, positions: np.ndarray) -> pa.RecordBatch:
    """The rows at `positions`, compact: a slice would drag its whole buffers through pickle."""
    if len(positions) == batch.num_rows and np.array_equal(positions, np.arange(batch.num_rows)):
        return batch
    return batch.take(pa.array(positions))


def _order(places: list[int]) -> np.ndarray | None:
    """The permutation that puts values found in the order of `places` into rows 0, 1, 2, …; None if none is needed."""
    array = np.asarray(places, dtype=np.int64)
    if np.array_equal(array, np.arange(len(array))):
        return None
    return np.argsort(array)


def assemble(payload: Payload, names: Sequence[str], fetched: Sequence[pa.RecordBatch]) -> Rows:
    """Rows of a payload; `fetched`: the batches behind its `refs`. Rows that lie together are read without a copy."""
    columns: dict[str, pa.Array] = {}
    for together in payload.sets:
        batches = [_resolve(part, together.names, fetched) for part in together.parts]
        joined = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        if together.order is not None:
            joined = joined.take(pa.array(together.order))
        columns.update(zip(together.names, joined.columns, strict=True))
    return Rows(payload.row_ids, payload.group_ids, pa.table([columns[name] for name in names], names=list(names)))


def by_value(payload: Payload, fetched: Sequence[pa.RecordBatch]) -> Payload:
    """The same rows without references: of each batch behind one, those rows and columns that are wanted."""

    def inline(part: Part, names: list[str]) -> Part:
        if part.batch is not None:
            return part
        return Part(_cut(fetched[part.ref].select(names), part.positions), 0, np.arange(len(part.positions)))

    sets = [
        ColumnSet(together.names, [inline(part, together.names) for part in together.parts], together.order)
        for together in payload.sets
    ]
    return Payload(payload.row_ids, payload.group_ids, sets)


def _resolve(part: Part, names: list[str], fetched: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if part.batch is not None:
        return part.batch
    batch = fetched[part.ref].select(names)
    first = int(part.positions[0])
    if np.array_equal(part.positions, np.arange(first, first + len(part.positions))):
        return batch.slice(first, len(part.positions))
    return batch.take(pa.array(part.positions))
