"""Whatever way rows were written, and wherever their values lie, a lease's reader gets them in order."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.graph.columns import Column
from penstock.store.data.blocks import Block, Blocks
from penstock.store.data.codec import Codec
from penstock.store.data.layout import Placed
from penstock.store.data.payload import Payload, assemble, by_value, gather
from penstock.store.errors import UnknownColumn

COLUMNS = [Column("prompt", "int32", "prompt", per_group=True), Column("x", "int32", "token"), Column("y", "int64")]
GROUPS = 4


def values_of(rows: list[int]) -> pa.RecordBatch:
    """Of two columns that are written together."""
    lists = pa.array([list(range(row, row + row % 3)) for row in rows], pa.list_(pa.int32()))
    return pa.record_batch({"x": lists, "y": pa.array(rows, pa.int64())})


class Written:
    """An index, and the batches behind its references."""

    def __init__(self, size: int) -> None:
        self.blocks, self.behind = Blocks(COLUMNS, size), dict[Placed, pa.RecordBatch]()
        prompts = pa.record_batch({"prompt": pa.array([[group] * 3 for group in range(GROUPS)], pa.list_(pa.int32()))})
        source = Block(prompts, None, prompts.nbytes)
        for group in range(GROUPS):
            self.blocks.add_group(group, source, group, ["prompt"])

    def write(self, rows: list[int], inline: bool) -> None:
        batch = values_of(rows)
        ref = Placed(f"w-{len(self.behind)}", 0, batch.num_rows, (), 0)
        block = Block(batch, None, batch.nbytes) if inline else Block(None, ref, batch.nbytes)
        self.behind[ref] = batch
        self.blocks.add_rows(rows, range(len(rows)), block, batch.schema.names)


def sent(payload: Payload) -> tuple[Payload, int]:
    """As it arrives, and the bytes that it took."""
    body, pieces, nbytes = Codec().encode(payload)
    area = pa.py_buffer(b"".join(pieces))
    assert area.size == nbytes
    return Codec().decode(Payload, body, area), len(body) + nbytes


@given(size=st.integers(1, 4), data=st.data())
def test_rows_come_as_they_were_written(size: int, data: st.DataObject) -> None:
    written = Written(size)
    left = data.draw(st.permutations(range(GROUPS * size)))
    while left:
        count = data.draw(st.integers(1, len(left)))
        some = left[:count] if data.draw(st.booleans()) else sorted(left[:count])
        written.write(some, data.draw(st.booleans()))
        left = left[count:]
    ended = data.draw(st.sets(st.integers(0, GROUPS * size - 1)))
    for row in ended:
        written.blocks.free(row // size, 1 << row % size)
    alive = st.sampled_from(sorted(set(range(GROUPS * size)) - ended) or [None])
    rows = sorted(row for row in data.draw(st.sets(alive)) if row is not None)
    names = data.draw(st.permutations(["prompt", "x", "y"]))
    payload, _ = sent(gather(written.blocks, rows, names))
    fetched = [written.behind[ref] for ref in payload.refs]
    copied = by_value(payload, fetched)
    assert copied.refs == []
    for found in (assemble(payload, names, fetched), assemble(copied, names, [])):
        assert found.names == tuple(names)
        assert found.row_ids.tolist() == rows
        assert found.lists("prompt") == [[row // size] * 3 for row in rows]
        assert found.lists("x") == [list(range(row, row + row % 3)) for row in rows]
        assert found.values("y").tolist() == rows


def test_no_more_of_a_batch_travels_than_is_wanted() -> None:
    written = Written(2)
    batch = pa.record_batch({"x": pa.array([[1] * 10_000] * 8, pa.list_(pa.int32()))})
    written.blocks.add_rows(list(range(8)), range(8), Block(batch, None, batch.nbytes), ["x"])
    for rows in ([0, 1], [2, 3, 4, 5], [7]):
        _, nbytes = sent(gather(written.blocks, rows, ["x"]))
        assert nbytes < len(rows) * 40_000 + 2000


def test_rows_of_one_batch_in_shared_memory_are_read_without_a_copy() -> None:
    written = Written(2)
    written.write(list(range(8)), inline=False)
    payload = gather(written.blocks, [2, 3, 4, 5], ["x", "y"])
    rows = assemble(payload, ["x", "y"], [written.behind[ref] for ref in payload.refs])
    there = next(iter(written.behind.values())).column("x").values.to_numpy()
    assert rows.ragged("x")[0].__array_interface__["data"][0] - there.__array_interface__["data"][0] == 4 * (0 + 1)


def test_a_column_that_a_row_lacks_is_named() -> None:
    written = Written(2)
    written.write([0, 1, 2], inline=True)
    with pytest.raises(UnknownColumn, match="row 3 has no column 'y'"):
        gather(written.blocks, [2, 3], ["y"])
