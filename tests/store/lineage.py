"""What every value was computed from, as whoever writes it knows: a model of the data that the ledger never sees."""

from collections.abc import Callable, Sequence

from penstock.store.ledger.group import bits, row_ids
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger
from penstock.store.spec import StoreSpec

Cell = tuple[int, str]
"""Row and column."""


class Lineage:
    """Lifecycle: told of each admission, lease and write, and asked to `prune` after each loss."""

    def __init__(self, spec: StoreSpec) -> None:
        self._spec = spec
        self._reads = {stage.name: stage.reads for stage in spec.stages}
        self._columns = [column.name for column in spec.columns]
        self._serial = 0
        self.values: dict[Cell, int] = {}
        """Number of the value that is in each cell. Each value has a number of its own."""
        self._node: dict[Cell, int] = {}
        self._sources: dict[Cell, dict[Cell, int]] = {}
        """The values that a value was computed from."""
        self._given: dict[int, dict[Cell, int]] = {}
        """Cells that the owner of each lease has read, with their values."""

    def admitted(self, ledger: Ledger, group: int, node: int) -> None:
        for row in row_ids(group, ledger.residents.all_rows, self._spec.group_size):
            for name in self._spec.source_columns:
                self._put((row, name), {}, node)

    def read(self, lease: HeldLease, stage: str) -> None:
        """The owner of a lease reads its rows. Raises `KeyError` for a value that is not there."""
        rows = [row for group, mask in lease.granted.items() for row in row_ids(group, mask, self._spec.group_size)]
        self._given[lease.id] = {(row, name): self.values[row, name] for row in rows for name in self._reads[stage]}

    def written(
        self, ledger: Ledger, lease: HeldLease, rows: Sequence[int], columns: Sequence[str], node: Callable[[], int]
    ) -> None:
        """Values that the ledger has kept; a cell that was there keeps its first. `node`: of each row."""
        for row in rows:
            sources = self._of(lease, row)
            self._check(ledger, row, sources)
            there = node()
            for name in columns:
                if (row, name) not in self.values:
                    self._put((row, name), sources, there)

    def cells_on(self, node: int) -> dict[int, dict[str, int]]:
        """Group -> column -> mask, as `Ledger.lost` takes them."""
        size = self._spec.group_size
        cells: dict[int, dict[str, int]] = {}
        for row, name in (cell for cell in self.values if self._node[cell] == node):
            columns = cells.setdefault(row // size, {})
            columns[name] = columns.get(name, 0) | 1 << row % size
        return cells

    def prune(self, ledger: Ledger) -> list[Cell]:
        """Forget values that the ledger has no more; which they were."""
        there = self._there(ledger)
        gone = [cell for cell in self.values if cell not in there]
        for cell in gone:
            del self.values[cell], self._node[cell], self._sources[cell]
        return gone

    def check(self, ledger: Ledger, rows: Sequence[int]) -> None:
        """These living rows have what is trained, and whatever they have was computed from what is there now."""
        trained = next(stage.reads for stage in self._spec.stages if stage.unit == "batch")
        for row in rows:
            assert all((row, name) in self.values for name in trained), f"row {row} lacks a value that is trained"
            computed = {id(sources): sources for name in self._columns if (sources := self._sources.get((row, name)))}
            for sources in computed.values():
                self._check(ledger, row, sources)

    def _check(self, ledger: Ledger, row: int, sources: dict[Cell, int]) -> None:
        for source, serial in sources.items():
            if self._is_live(ledger, source[0]):
                assert self.values.get(source) == serial, f"row {row} has what was computed from another {source}"

    def _there(self, ledger: Ledger) -> set[Cell]:
        names = ledger.residents.readiness.column_index
        size = self._spec.group_size
        return {
            (group.id * size + sample, name)
            for group in ledger.residents.groups.values()
            for name, index in names.items()
            for sample in bits(group.have[index] & group.live)
        }

    def _is_live(self, ledger: Ledger, row: int) -> bool:
        group = ledger.residents.groups.get(row // self._spec.group_size)
        return group is not None and bool(group.live >> row % self._spec.group_size & 1)

    def _of(self, lease: HeldLease, row: int) -> dict[Cell, int]:
        """What the result of a row depends on: all rows of its group that the lease was granted."""
        size = self._spec.group_size
        given = self._given[lease.id]
        stage = self._spec.stages[lease.stage]
        if stage.unit == "group":
            return {cell: serial for cell, serial in given.items() if cell[0] // size == row // size}
        return {cell: serial for cell, serial in given.items() if cell[0] == row}

    def _put(self, cell: Cell, sources: dict[Cell, int], node: int) -> None:
        self._serial += 1
        self.values[cell], self._sources[cell], self._node[cell] = self._serial, sources, node
