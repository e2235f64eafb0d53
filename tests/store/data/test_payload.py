"""Whatever way rows were written, and wherever their values lie, a lease's reader gets them in order."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.graph.columns import Column
from penstock.store.data import block_index
from penstock.store.data.block_index import BlockIndex, Payload, ValueBlock, assemble, by_value, gather, rows_at
from penstock.store.data.codec import NOTHING, Codec, InlineBatch, SegmentRef
from penstock.store.data.remote_rows import RowsRequest, split_remote, with_remote
from penstock.store.data.schema import encode
from penstock.store.errors import TooLarge, UnknownColumn

COLUMNS = [
    Column("prompt", "int32", "prompt", per_group=True), Column("seen", "binary", "list", per_group=True),
    Column("x", "int32", "token"), Column("y", "int64"), Column("screens", "binary", "list"), Column("icon", "binary"),
]  # fmt: skip
GROUPS = 4
FAR = "another"
"""Node."""


def values_of(rows: list[int]) -> pa.RecordBatch:
    """Values of columns that are written together."""
    values = {
        "x": [list(range(row, row + row % 3)) for row in rows],
        "y": rows,
        "screens": [screens_of(row) for row in rows],
        "icon": [icon_of(row) for row in rows],
    }
    return encode({column.name: column for column in COLUMNS}, values, rows)[0]


def seen_by(group: int) -> list[bytes]:
    """Pictures of a group: none, or a short and a long one."""
    return [b"%d" % group, b"picture of group %d" % group][: 2 * (group % 3)]


def screens_of(row: int) -> list[bytes]:
    return [b"screen %d of several" % (row // 2 + turn) for turn in range(row % 3)]


def icon_of(row: int) -> bytes:
    return b"i" * (row % 20)


class Written:
    """An index, and the batches behind its references."""

    def __init__(self, size: int, is_source_far: bool = False) -> None:
        self.blocks, self.behind = BlockIndex(COLUMNS, size), dict[SegmentRef, pa.RecordBatch]()
        given = {"prompt": [[group] * 3 for group in range(GROUPS)], "seen": list(map(seen_by, range(GROUPS)))}
        prompts = encode({column.name: column for column in COLUMNS}, given, range(GROUPS))[0]
        source = ValueBlock(prompts, None, prompts.nbytes)
        if is_source_far:
            ref = SegmentRef("s-0", 0, GROUPS, (), 0, FAR)
            self.behind[ref], source = prompts, ValueBlock(None, ref, prompts.nbytes)
        for group in range(GROUPS):
            self.blocks.add_group(group, source, group, ["prompt", "seen"])

    def write(self, rows: list[int], inline: bool, node: str = "") -> None:
        batch = values_of(rows)
        ref = SegmentRef(f"w-{len(self.behind)}", 0, batch.num_rows, (), 0, node)
        block = ValueBlock(batch, None, batch.nbytes) if inline else ValueBlock(None, ref, batch.nbytes)
        self.behind[ref] = batch
        self.blocks.add_rows(rows, range(len(rows)), block, batch.schema.names)


WIDE = 1 << 20
"""Bytes of a value that a few thousand rows share."""


@pytest.mark.parametrize("num_rows", [3, 2**31 // WIDE, 3000])
@pytest.mark.parametrize("kind", ["string", "list", "list of strings"])
def test_a_read_that_arrow_has_no_room_for_is_refused_by_its_column(kind: str, num_rows: int) -> None:
    """One value for all rows of a group: it is multiplied only where it is read."""
    lists = pa.ListArray.from_arrays(pa.array([0, WIDE], pa.int32()), pa.array(np.zeros(WIDE, np.int8)))
    texts = ["x" * (WIDE - WIDE // 2), "x" * (WIDE // 2)]
    kinds = {"string": pa.array(["x" * WIDE]), "list": lists, "list of strings": pa.array([texts])}
    batch = pa.record_batch({"task": kinds[kind]})
    places = np.asarray([[0, 0, 0, num_rows]])
    if num_rows == 3:
        assert rows_at([batch], ["task"], places).num_rows == 3
        return
    with pytest.raises(TooLarge, match=rf"column 'task' of these {num_rows} rows has {num_rows * WIDE} "):
        rows_at([batch], ["task"], places)


def test_parts_that_fit_and_their_sum_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are those of the rows that are read, not of the batches that they lie in."""
    monkeypatch.setattr(block_index, "MAX_ENTRIES", 10)
    batches = [
        pa.record_batch({"x": pa.array(["abc", "defgh"])}).slice(1),
        pa.record_batch({"x": pa.array(["ab"] * 9)}),
    ]
    assert rows_at(batches, ["x"], np.asarray([[0, 0, 1, 1], [1, 3, 1, 2]]))["x"].to_pylist() == ["defgh", "ab", "ab"]
    assert rows_at(batches, ["x"], np.asarray([[0, 0, 0, 2]]))["x"].to_pylist() == ["defgh"] * 2
    for places in ([[0, 0, 1, 1], [1, 3, 1, 3]], [[0, 0, 0, 3]]):
        with pytest.raises(TooLarge):
            rows_at(batches, ["x"], np.asarray(places))


def sent(payload: Payload) -> tuple[Payload, int]:
    """The payload as it arrives, and the bytes that it took."""
    body, pieces, nbytes = Codec().encode(payload)
    area = pa.py_buffer(b"".join(pieces))
    assert area.size == nbytes
    return Codec().decode(Payload, body, area), len(body) + nbytes


def pulled(payload: Payload, written: Written) -> Payload:
    """With what is remote in its place, as it comes from there; and no more of it than that."""
    asked, rest = split_remote(payload, "")
    asked = Codec().decode(list[RowsRequest], Codec().encode(asked)[0], NOTHING)
    answers = [one.of(written.behind[one.placed].select(one.names)) for one in asked]
    assert [answer.num_rows for answer in answers] == [one.num_rows for one in asked]
    assert not any(placed.node for placed in rest.refs)
    return with_remote(rest, answers)


@given(size=st.integers(1, 4), data=st.data())
def test_rows_come_as_they_were_written(size: int, data: st.DataObject) -> None:
    written = Written(size, data.draw(st.booleans()))
    left = data.draw(st.permutations(range(GROUPS * size)))
    while left:
        count = data.draw(st.integers(1, len(left)))
        some = left[:count] if data.draw(st.booleans()) else sorted(left[:count])
        written.write(some, data.draw(st.booleans()), data.draw(st.sampled_from(["", FAR])))
        left = left[count:]
    ended = data.draw(st.sets(st.integers(0, GROUPS * size - 1)))
    for row in ended:
        written.blocks.free(row // size, 1 << row % size)
    alive = st.sampled_from(sorted(set(range(GROUPS * size)) - ended) or [None])
    rows = sorted(row for row in data.draw(st.sets(alive)) if row is not None)
    names = data.draw(st.permutations(["prompt", "seen", "x", "y", "screens", "icon"]))
    payload, _ = sent(gather(written.blocks, rows, names))
    read = payload.with_batches([written.behind[ref] for ref in payload.refs])
    copied = by_value(read)
    assert copied.refs == []
    here = pulled(payload, written)
    found_here = assemble(here.with_batches([written.behind[ref] for ref in here.refs]), names)
    for found in (assemble(read, names), assemble(copied, names), found_here):
        assert found.names == tuple(names)
        assert found.row_ids.tolist() == rows
        assert found.lists("prompt") == [[row // size] * 3 for row in rows]
        assert found.lists("x") == [list(range(row, row + row % 3)) for row in rows]
        assert found.values("y").tolist() == rows
        assert [list(map(bytes, some)) for some in found.blobs("seen")] == [seen_by(row // size) for row in rows]
        assert [list(map(bytes, some)) for some in found.blobs("screens")] == list(map(screens_of, rows))
        assert list(map(bytes, found.blobs("icon"))) == list(map(icon_of, rows))


def test_no_more_of_a_batch_travels_than_is_wanted() -> None:
    written = Written(2)
    batch = pa.record_batch({"x": pa.array([[1] * 10_000] * 8, pa.list_(pa.int32()))})
    written.blocks.add_rows(list(range(8)), range(8), ValueBlock(batch, None, batch.nbytes), ["x"])
    for rows in ([0, 1], [2, 3, 4, 5], [7]):
        _, nbytes = sent(gather(written.blocks, rows, ["x"]))
        assert nbytes < len(rows) * 40_000 + 2000


def test_what_the_source_wrote_for_a_group_travels_once() -> None:
    written = Written(4)
    for rows, groups in ((list(range(16)), 4), (list(range(4, 12)), 2), ([5, 6, 14], 2)):
        payload, _ = sent(gather(written.blocks, rows, ["prompt"]))
        (source,) = payload.sources
        assert isinstance(source, InlineBatch)
        assert source.batch.num_rows == groups
        assert assemble(payload, ["prompt"]).lists("prompt") == [[row // 4] * 3 for row in rows]


def test_rows_of_one_batch_in_shared_memory_are_read_without_a_copy() -> None:
    written = Written(2)
    written.write(list(range(8)), inline=False)
    payload = gather(written.blocks, [2, 3, 4, 5], ["x", "y"])
    rows = assemble(payload.with_batches([written.behind[ref] for ref in payload.refs]), ["x", "y"])
    there = next(iter(written.behind.values())).column("x").values.to_numpy()
    assert rows.ragged("x")[0].__array_interface__["data"][0] - there.__array_interface__["data"][0] == 4 * (0 + 1)


def test_of_another_node_a_lease_pulls_its_rows_and_columns_once() -> None:
    written = Written(4, is_source_far=True)
    written.write(list(range(16)), inline=False, node=FAR)
    asked, rest = split_remote(gather(written.blocks, list(range(2, 10)), ["prompt", "y"]), "")
    assert [(one.names, one.places.tolist()) for one in asked] == [
        (["prompt"], [[0, 1, 1], [1, 1, 1], [2, 1, 1]]), (["y"], [[2, 1, 8]]),
    ]  # fmt: skip
    assert [places.tolist() for _, places in rest.columns] == [
        [[0, 0, 0, 2], [0, 1, 0, 4], [0, 2, 0, 2]],
        [[1, 0, 1, 8]],
    ]


def test_a_column_that_a_row_lacks_is_named() -> None:
    written = Written(2)
    written.write([0, 1, 2], inline=True)
    with pytest.raises(UnknownColumn, match="row 3 has no column 'y'"):
        gather(written.blocks, [2, 3], ["y"])
