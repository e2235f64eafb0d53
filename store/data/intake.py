"""Incoming data: a batch as it was sent, checked against the schema, becomes a block."""

from collections.abc import Iterable

from penstock.store.data.blocks import Block
from penstock.store.data.layout import Placed, SentBatch, kind_of
from penstock.store.data.schema import check_types
from penstock.store.data.segments import Segments
from penstock.store.errors import RowsLost, StoreError
from penstock.store.spec import StoreSpec


class Intake:
    """The entrance of batches. Small ones stay where they are; large ones lie in segments, where there are any."""

    def __init__(self, spec: StoreSpec, segments: Segments | None) -> None:
        self._segments = segments
        self._inline_bytes = spec.inline_bytes
        self.lost_nodes: set[str] = set()
        """Nodes that count as lost: what lies there is not taken."""
        self.columns = {column.name: column for column in spec.columns}

    async def ready(self, sent: SentBatch) -> SentBatch:
        """Prepare a batch, so that `block` takes it without keeping others waiting. Raises `StoreError`; then nothing
        of it is kept."""
        if self._segments is None:
            return sent
        if isinstance(sent, Placed):
            await self._segments.spill_if_needed(sent)
            return sent
        if sent.batch.nbytes <= self._inline_bytes:
            return sent
        return await self._segments.keep_in_thread(sent.batch)

    def block(self, sent: SentBatch, num_rows: int) -> Block:
        """Make a block. Raises `UnknownColumn`, `WrongType`, `WrongLength`, `StoreError`; then nothing of the batch
        is kept."""
        if isinstance(sent, Placed):
            return self._adopted(sent, num_rows)
        batch = sent.batch
        kinds = map(kind_of, batch.schema.types)
        self._check(zip(batch.schema.names, kinds, strict=True), batch.num_rows, num_rows)
        if self._segments is None or batch.nbytes <= self._inline_bytes:
            return Block(batch, None, batch.nbytes)
        return self._adopted(self._segments.keep(batch), num_rows)

    def free(self, block: Block) -> None:
        """Free a block in which no cell lies any more."""
        if block.ref is not None and self._segments is not None:
            self._segments.end(block.ref.segment)

    def _adopted(self, placed: Placed, num_rows: int) -> Block:
        assert self._segments is not None
        if placed.node in self.lost_nodes:
            raise RowsLost(f"segment {placed.segment} lies on node {placed.node}, which counts as lost.")
        self._segments.adopt(placed)
        block = Block(None, placed, placed.nbytes)
        try:
            self._check(((name, kind) for name, kind, _ in placed.columns), placed.num_rows, num_rows)
        except StoreError:
            self.free(block)
            raise
        return block

    def _check(self, types: Iterable[tuple[str, str]], num_came: int, num_rows: int) -> None:
        check_types(self.columns, types, num_came, num_rows)
