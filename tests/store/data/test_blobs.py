"""Blobs: equal ones are kept once, rows share them however they are copied, and 2 GiB are no bound."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.graph.columns import Column
from penstock.store.data.block_index import BlockIndex, ValueBlock, assemble, by_value, gather
from penstock.store.data.codec import SegmentRef
from penstock.store.data.rows import Rows
from penstock.store.data.schema import MAX_BYTES, blobs_of, check_types, compact_blobs, encode, encode_blobs, take_rows
from penstock.store.errors import StoreError, WrongType

COLUMNS = {"one": Column("one", "binary"), "some": Column("some", "binary", "list")}
BLOBS = st.binary(max_size=4) | st.sampled_from([b"", b"x" * 12, b"y" * 13, b"z" * 40, b"z" * 39 + b"."])


def data_bytes(array: pa.Array) -> int:
    """Bytes of the buffers of an array's blobs."""
    values = array.values if pa.types.is_list(array.type) else array
    return sum(buffer.size for buffer in values.buffers()[2:])


@given(st.lists(st.tuples(BLOBS, st.lists(BLOBS, max_size=3)), max_size=6), st.data())
def test_whatever_is_done_with_rows_they_keep_their_blobs_once(given_rows, data: st.DataObject) -> None:
    values = {"one": [one for one, _ in given_rows], "some": [some for _, some in given_rows]}
    batch, facts = encode(COLUMNS, values, range(len(given_rows)))
    batch.validate(full=True)
    check_types(
        COLUMNS, [(name, str(batch.column(name).type)) for name in batch.schema.names], len(given_rows), len(given_rows)
    )
    long = {blob for blob in values["one"] if len(blob) > 12}
    assert data_bytes(batch["one"]) == sum(map(len, long))
    in_lists = {blob for some in values["some"] for blob in some if len(blob) > 12}
    assert sum(facts.row_bytes) == sum(map(len, long)) + sum(map(len, in_lists)) + sum(
        16 + 4 + 16 * len(some) for some in values["some"]
    )
    ids = np.arange(len(given_rows))
    rows = Rows(ids, ids, pa.Table.from_batches([batch]))
    positions = data.draw(st.lists(st.integers(0, len(given_rows) - 1), max_size=8)) if given_rows else []
    start = data.draw(st.integers(0, len(given_rows)))
    sliced = [compact_blobs(array) for array in batch.slice(start).columns]
    found = {
        "select": (rows.select(positions), positions),
        "concat": (Rows.concat([rows.select(positions), rows]), [*positions, *ids]),
        "slice": (Rows(*2 * [ids[start:]], pa.table(sliced, ["one", "some"])), ids[start:]),
    }
    for some, expected in found.values():
        assert list(map(bytes, some.blobs("one"))) == [values["one"][row] for row in expected]
        assert [list(map(bytes, blobs)) for blobs in some.blobs("some")] == [values["some"][row] for row in expected]
        assert some.lengths("some").tolist() == [len(values["some"][row]) for row in expected]
    taken = found["select"][0].table()
    assert data_bytes(compact_blobs(taken.column("one").combine_chunks())) == sum(
        map(len, {values["one"][row] for row in positions} & long)
    )


def address(blob: memoryview) -> int:
    return int(np.frombuffer(blob, np.uint8).__array_interface__["data"][0])


def test_rows_share_a_blob_also_when_they_are_copied() -> None:
    array = encode_blobs([b"a" * 100, b"a" * 50 + b"a" * 50, b"b" * 100])
    rows = Rows(np.arange(3), np.arange(3), pa.table({"one": array}))
    blobs = Rows.concat([rows.select([1, 0]), rows]).blobs("one")
    assert len({address(blob) for blob in blobs}) == 2
    assert address(blobs[0]) == array.buffers()[2].address
    assert all(blob.readonly for blob in blobs)


def test_a_buffer_that_can_be_written_to_is_copied_first() -> None:
    given = bytearray(b"a" * 100)
    array = encode_blobs([given, memoryview(given)])
    given[0] = 0
    assert set(map(bytes, blobs_of(array))) == {b"a" * 100}


@pytest.mark.parametrize("value", ["text", 3, None, np.zeros(3, np.uint8), [b"a"]])
def test_what_is_no_bytes_is_refused_by_its_row(value) -> None:
    with pytest.raises(WrongType, match=r"column 'one', row 8: .*it must be binary"):
        encode(COLUMNS, {"one": [b"a", value]}, [7, 8])
    if not isinstance(value, list):
        with pytest.raises(WrongType, match=r"column 'some', row 8: "):
            encode(COLUMNS, {"some": [[b"a"], [value]]}, [7, 8])
    with pytest.raises(WrongType, match=r"column 'some', row 7: got b'a'; it must be binary, any number"):
        encode(COLUMNS, {"some": [b"a", []]}, [7, 8])


def test_a_blob_larger_than_arrow_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match=f"one value has at most {MAX_BYTES}"):
        encode_blobs([memoryview(np.zeros(MAX_BYTES + 1, np.uint8)).toreadonly()])


def test_blobs_have_their_accessor_and_shapes() -> None:
    table = Rows.from_lists({"pictures": [[b"a"], []], "reward": [1.0, 2.0]}).table()
    rows = Rows(*2 * [np.arange(2)], table.append_column("one", encode_blobs([b"a", b"b"])))
    for ask in (rows.arrays, rows.values, rows.strings):
        for name in ("pictures", "one"):
            with pytest.raises(StoreError, match=rf"use \.blobs\('{name}'\)"):
                ask(name)
    with pytest.raises(StoreError, match=r"use \.values\('reward'\)"):
        rows.blobs("reward")
    with pytest.raises(ValueError, match="binary values are one a row"):
        Column("x", "binary", "token")


def test_a_lease_of_more_than_two_gib_is_read_and_sent_without_a_copy() -> None:
    """Of pages that nobody has touched, so it costs no memory as long as nobody copies them."""
    column, num_groups, size = Column("pictures", "binary", "list", per_group=True), 5, 2**30
    blocks, behind = BlockIndex([column], 8), {}
    zeros = np.zeros(size, np.uint8)
    zeros.setflags(write=False)
    for group in range(num_groups):
        picture = encode_blobs([b"0123456789abc"])  # its digest would touch them
        views = picture.buffers()[1].to_pybytes()
        image = np.frombuffer(views, np.int32).copy()
        image[:] = size, 0, 0, 0
        picture = pa.Array.from_buffers(pa.binary_view(), 1, [None, pa.py_buffer(image), pa.py_buffer(zeros)])
        batch = pa.record_batch({"pictures": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), picture)})
        ref = SegmentRef(f"w-{group}", 0, 1, (), size)
        behind[ref] = batch
        blocks.add_group(group, ValueBlock(None, ref, size), 0, ["pictures"])
    payload = gather(blocks, range(8 * num_groups), ["pictures"])
    payload = payload.with_batches([behind[ref] for ref in payload.refs])
    for found in (assemble(payload, ["pictures"]), assemble(by_value(payload), ["pictures"])):
        pictures = found.select(range(4, 8 * num_groups)).blobs("pictures")
        assert [len(some[0]) for some in pictures] == [size] * (8 * num_groups - 4)
        assert {address(some[0]) for some in pictures} == {zeros.ctypes.data}


def test_a_part_takes_no_blob_of_others_along() -> None:
    batch, _ = encode(COLUMNS, {"some": [[b"a" * 100], [b"b" * 100, b"a" * 100], [b"c" * 100]]}, range(3))
    for positions, nbytes in (([0], 100), ([1], 200), ([2, 0, 2], 200), ([], 0)):
        assert data_bytes(take_rows(batch["some"], pa.array(positions, pa.int64()))) == nbytes
