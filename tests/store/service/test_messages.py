"""Whatever comes is a message of the type that was asked for, or `Malformed`: never run, never a crash."""

import contextlib
import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from penstock.network.connection import HEADER
from penstock.store import errors
from penstock.store.data.block_index import Payload
from penstock.store.data.codec import NOTHING, Codec, InlineBatch, Malformed, SegmentRef
from penstock.store.data.schema import VIEW, encode_blobs
from penstock.store.data.segments import SegmentNotice
from penstock.store.errors import StoreError, UnknownStage
from penstock.store.ledger.group import Facts
from penstock.store.service.store import Store
from penstock.store.service.wire import ClientMessage, Grant, Hello, LeaseRequest, StoreAnswer, WriteRequest, calls_of
from penstock.store.spec import StoreSpec
from tests.store.driver import make_spec
from tests.store.frames import frame, read

KINDS = [
    calls_of(Store).message_type,
    Hello,
    StoreAnswer[Raw],
    StoreAnswer[list[int] | None],
    list[Grant] | None,
    Grant,
    StoreSpec,
]


def messages() -> list[Any]:
    """Messages of every kind that has a batch, an array or an error in it."""
    calls = calls_of(Store)
    lists = pa.array([[1], [2, 3], [], [4], [5]], pa.list_(pa.int32()))
    blobs = {"one": encode_blobs([b"x" * 20, b"", b"x", b"y" * 20, b"x" * 20])}
    blobs["some"] = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3, 5, 5], pa.int32()), blobs["one"])
    batch = pa.record_batch({"x": pa.array(range(5)), "lists": lists, "text": pa.array(["é"] * 5), **blobs})
    facts = Facts([4] * 5, [0] * 5, None, None, "response_ids", [1] * 5)
    placed = SegmentRef("client-1", 3, 5, (("x", "int32", ((0, 20),)),), 20)
    writes = [WriteRequest(1, "rollout", [0, 1], ["x"], sent, facts) for sent in (InlineBatch(batch), placed)]
    payload = Payload(np.arange(5), np.arange(5), [InlineBatch(batch), placed], [(["x"], np.arange(8).reshape(-1, 4))])
    granted = Grant(1, "rollout", ("x",), payload)
    return [
        ClientMessage(0, calls.request("put", (["x"], InlineBatch(batch), facts, "client", [1, 2]))),
        ClientMessage(1, calls.request("many", ([("write", (write,)) for write in writes],)), ["client-1"]),
        ClientMessage(2, calls.request("lease", (LeaseRequest("rollout", 3, "engine"),))),
        ClientMessage(3, None),
        StoreAnswer(3, [granted]),
        StoreAnswer(None, None, None, SegmentNotice(["a"], ["b"])),
        StoreAnswer(1, None, StoreError("no")),
        [granted],
        granted,
        make_spec(),
        Hello("client"),
    ]


FRAMES = [frame(message) for message in messages()]


def decode(data: bytes) -> int:
    """Decode bytes as every kind of message; return how many kinds they were."""
    found = 0

    def hear(_: int, body: memoryview, area: pa.Buffer) -> None:
        nonlocal found
        for kind in KINDS:
            with contextlib.suppress(Malformed):
                repr(Codec().decode(kind, body, area))
                found += 1

    read(data, 1 << 20, hear)
    return found


def test_every_message_is_one() -> None:
    assert all(decode(data) for data in FRAMES)


def test_what_a_store_is_made_for_arrives_as_it_was() -> None:
    body, _, _ = Codec().encode(make_spec())
    assert Codec().decode(StoreSpec, body, NOTHING) == make_spec()


@given(st.binary(max_size=300), st.floats(0, 1))
def test_random_bytes_do_no_harm(data: bytes, share: float) -> None:
    decode(data)
    num_body = int(share * len(data))
    decode(HEADER.pack(0, num_body, len(data) - num_body) + data)


@given(st.sampled_from(FRAMES), st.data())
def test_damaged_messages_do_no_harm(message: bytes, data: st.DataObject) -> None:
    """Bytes are changed, cut out or put in; the header fits."""
    _, num_body, _ = HEADER.unpack_from(message)
    changed = bytearray(message[HEADER.size :])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    num_body = min(len(changed), num_body)
    decode(HEADER.pack(0, num_body, len(changed) - num_body) + bytes(changed))


@pytest.mark.parametrize(
    "note",
    [
        (2**62, [["x", "int32", [[0, 8]]]]),
        (-1, [["x", "int32", [[0, 8]]]]),
        (2, [["x", "int32", [[8, 8]]]]),
        (2, [["x", "int32", [[0, -8]]]]),
        (1, [["x", "string", [[0, 8], [0, 0]]]]),
        (1, [["x", "list<item: int32>", [[0, 4], [0, 8]]]]),
        (1, [["x", "extension", [[0, 8]]]]),
        (2, [["x", "int32", []]]),
        (1, [["x", "binary_view", []]]),
        (1, [["x", "binary_view", [[0, 8]]]]),
        (1, [["x", "int32", [[0, 4], [4, 4]]]]),
    ],
)
def test_a_batch_whose_values_lie_elsewhere_is_refused(note: Any) -> None:
    body, _, _ = Codec().encode(["inline", note])
    with pytest.raises(Malformed):
        Codec().decode(InlineBatch, body, pa.py_buffer(np.array([3, 9], dtype=np.int32)))


def test_a_codec_holds_on_to_nothing_of_a_message() -> None:
    """It lies in a cycle, which may be collected late, and a message may have gigabytes of pictures."""
    batch = pa.record_batch({"x": pa.array(range(1000))})
    gc.disable()
    try:
        codec = Codec()
        body, pieces, num_bytes = codec.encode(batch)
        sent = weakref.ref(pieces[0])
        area = np.frombuffer(b"".join(map(bytes, pieces)), np.uint8).copy()
        assert len(area) == num_bytes
        came = weakref.ref(area)
        found = codec.decode(pa.RecordBatch, body, pa.py_buffer(area))
        assert found.equals(batch)
        del found, area, pieces, batch
        assert came() is None
        assert sent() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("view", [(20, 1, 0), (20, -1, 0), (20, 0, 8), (20, 0, -1), (-1, 0, 0), (2**31 - 1, 0, 0)])
def test_a_view_that_leads_out_of_its_blobs_is_refused(view: tuple[int, int, int]) -> None:
    blob, (size, buffer, offset) = b"0123456789" * 2, view
    for is_right, numbers in ((True, (20, 0, 0)), (False, (size, buffer, offset))):
        views = np.zeros(1, VIEW)
        views[0] = numbers[0], b"0123", *numbers[1:]
        pieces = [None, pa.py_buffer(views), pa.py_buffer(blob)]
        one = pa.Array.from_buffers(pa.binary_view(), 1, pieces)
        batch = pa.record_batch({"one": one, "some": pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), one)})
        for column in ("one", "some"):
            body, sent, _ = Codec().encode(batch.select([column]))
            decode = partial(Codec().decode, pa.RecordBatch, body, pa.py_buffer(b"".join(map(bytes, sent))))
            if is_right:
                assert decode().equals(batch.select([column]))
            else:
                with pytest.raises(Malformed):
                    decode()


def test_errors_travel_by_name_and_unknown_ones_as_the_stores() -> None:
    def carried(error: StoreError) -> StoreError:
        found: StoreError = Codec().decode(StoreError, Codec().encode(error)[0], NOTHING)
        return found

    for name in [name for name, kind in vars(errors).items() if isinstance(kind, type)]:
        found = carried(errors.error_named(name, "a, b: é"))
        assert (type(found).__name__, str(found)) == (name, "a, b: é")
    assert isinstance(carried(UnknownStage("x")), UnknownStage)

    class Local(StoreError):
        pass

    assert (type(carried(Local("x"))), str(carried(Local("x")))) == (StoreError, "Local: x")
