"""The places of values: (group, column, sample) -> place in a block. The index of the data plane.

A block is what one write brought: an Arrow record batch, here or behind a reference that this file treats as opaque.
It goes with the last of its cells. `payload.py` gathers what a lease sends.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.algorithms.graph.columns import Column
from penstock.store.data.schema import arrow_type
from penstock.store.errors import UnknownColumn
from penstock.store.ledger.group import Span, bits, spans_of


class Block:
    """A record batch, `batch` or behind `ref`, and how many of its cells are alive."""

    __slots__ = ("batch", "is_gone", "nbytes", "num_cells", "ref")

    def __init__(self, batch: pa.RecordBatch | None, ref: Any, nbytes: int) -> None:
        self.batch = batch
        self.ref = ref
        self.nbytes = nbytes
        self.num_cells = 0
        self.is_gone = False
        """True once what is behind `ref` cannot be had any more."""


class Place(NamedTuple):
    """A place of values: the i-th is at `start + i * stride` of the block."""

    block: Block
    start: int
    stride: int
    """Step between values. 1: they were written side by side. 0: all are one value, which the source wrote for the
    group."""


Cells = Place | list[Place | None]
"""Places of one column of a group: one for all samples, or one for each."""


class Blocks:
    """All cells of the resident groups."""

    def __init__(
        self, columns: Sequence[Column], group_size: int, freed: Callable[[Block], None] = lambda block: None
    ) -> None:
        """Prepare an empty index. `freed`: called with each block whose last cell has gone."""
        self._freed = freed
        self._types = {column.name: arrow_type(column) for column in columns}
        self.group_size = group_size
        self._cells: dict[int, dict[str, Cells]] = {}
        self._living: set[Block] = set()
        self._referring: set[Block] = set()
        """Living blocks that are behind a reference."""
        self.bytes = 0
        """Bytes of blocks with a living cell."""

    def add_group(self, group_id: int, block: Block, position: int, names: Sequence[str]) -> None:
        """Add the source's columns of a new group: one value each, shared by its rows."""
        self._cells[group_id] = dict.fromkeys(names, Place(block, position, 0))
        self._count(block, len(names))

    def add_rows(self, row_ids: Sequence[int], positions: Sequence[int], block: Block, names: Sequence[str]) -> None:
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
                group.update(dict.fromkeys(names, Place(block, start, 1)))
                added += len(names)
                continue
            for offset, index in enumerate(indices):
                cell = Place(block, kept[first + offset], 1)
                added += sum(self._add_cell(group, name, index, cell) for name in names)
        self._count(block, added)

    def _add_cell(self, group: dict[str, Cells], name: str, index: int, cell: Place) -> bool:
        cells = group.get(name)
        if cells is None:
            cells = group[name] = [None] * self.group_size
        if isinstance(cells, Place) or cells[index] is not None:
            return False
        cells[index] = cell
        return True

    def pin(self, block: Block) -> None:
        """Keep a block until `unpin`, whatever becomes of its cells."""
        self._count(block, 1)

    def unpin(self, block: Block) -> None:
        self._uncount(block)

    def free(self, group_id: int, mask: int) -> None:
        """Remove the cells of the mask's rows, which have ended."""
        if mask == (1 << self.group_size) - 1:
            for cells in self._cells.pop(group_id, {}).values():
                if isinstance(cells, Place):
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
            if isinstance(cells, Place) and (not cells.stride or mask == (1 << self.group_size) - 1):
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

    def lost(self, num_rows: int = 2048) -> Iterator[dict[int, dict[str, int]]]:
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
            if isinstance(cells, Place):
                mask = (1 << self.group_size) - 1 if cells.block.is_gone else 0
            else:
                mask = sum(1 << i for i, cell in enumerate(cells) if cell is not None and cell.block.is_gone)
            if mask:
                lost[name] = mask
        return lost

    def _free_cells(self, group: dict[str, Cells], name: str, mask: int) -> None:
        """Remove these samples' cells, but for a value that the source wrote for the group."""
        cells = group[name]
        if isinstance(cells, Place):
            if not cells.stride:
                return
            cells.block.num_cells += self.group_size - 1  # it counted as one
            cells = group[name] = [Place(cells.block, cells.start + i, 1) for i in range(self.group_size)]
        ended = list(bits(mask))
        self._uncount_all([cells[index] for index in ended])
        for index in ended:
            cells[index] = None

    @property
    def num_blocks(self) -> int:
        return len(self._living)

    def begin_copy(self) -> "Blocks":
        """Make an index for the same columns, which `keep` fills. Changes of either do not concern the other."""
        copied = Blocks.__new__(Blocks)
        copied._types, copied.group_size, copied._freed = self._types, self.group_size, _stay
        copied._living, copied._referring, copied.bytes, copied._cells = set(), set(), 0, {}
        return copied

    def keep(self, group_id: int, copied: "Blocks") -> None:
        """Copy the cells of a group as they are; the values are shared, and stay until `release_copy`."""
        columns = self._cells[group_id]
        copied._cells[group_id] = kept = {
            name: cells if isinstance(cells, Place) else list(cells) for name, cells in columns.items()
        }
        for block in _blocks_of(kept):
            self._count(block, 1)

    def release_copy(self, copied: "Blocks", num_groups: int) -> bool:
        """Free the cells of so many copied groups, which are not needed any more. Returns whether others are left."""
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

    def places(self, spans: Sequence[Span], name: str) -> "tuple[Place | tuple[Place, ...], ...]":
        """Places of the column in each span: see `found`."""
        cells, nothing, places = self._cells, dict[str, Cells](), list[Place | tuple[Place, ...]]()
        for group_id, _, indices in spans:
            place = cells.get(group_id, nothing).get(name)
            places.append(place if isinstance(place, Place) else self.found(group_id, indices, name))
        return tuple(places)

    def found(self, group_id: int, indices: range, name: str) -> "Place | tuple[Place, ...]":
        """Find a column of these samples: one place of the whole group, or each sample's. Equal for columns that lie
        side by side. Raises `UnknownColumn` if one lacks it."""
        cells = self._cells.get(group_id, {}).get(name)
        if isinstance(cells, Place):
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

    def _count(self, block: Block, num_cells: int) -> None:
        if num_cells and not block.num_cells:
            self._living.add(block)
            if block.ref is not None:
                self._referring.add(block)
            self.bytes += block.nbytes
        block.num_cells += num_cells

    def _uncount(self, block: Block) -> None:
        block.num_cells -= 1
        if not block.num_cells:
            self._living.discard(block)
            self._referring.discard(block)
            self.bytes -= block.nbytes
            self._freed(block)

    def _uncount_all(self, cells: Sequence[Place | None]) -> None:
        for cell in cells:
            if cell is not None:
                self._uncount(cell.block)


def _stay(block: Block) -> None:
    """Free nothing: what a copy has is freed by the index that it was copied from."""


def _blocks_of(columns: dict[str, Cells]) -> set[Block]:
    found: set[Block] = set()
    for cells in columns.values():
        found.update((cells.block,) if isinstance(cells, Place) else [cell.block for cell in cells if cell is not None])
    return found


def _has(group: dict[str, Cells], name: str, index: int) -> bool:
    cells = group.get(name)
    return cells is not None and (isinstance(cells, Place) or cells[index] is not None)
