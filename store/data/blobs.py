"""Blobs: values of dtype `binary`, each a string of bytes of any length, as pictures are.

    list column   offsets │ views │ blob │ blob │ …      Arrow's binary views: 16 bytes a value, which say where it lies
    sample column           views │ blob │ blob │ …      or, up to 12 bytes long, are the value

Rows that are copied copy views. So all rows that share a blob share its memory, within a write and in whoever reads it,
and all blobs of a batch may be larger than 2 GiB together. Each blob is a buffer of its own: a part of a batch is its
views and those of the buffers that they name (`compact`), and no blob is copied to send it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

VIEW = np.dtype([("size", "<i4"), ("prefix", "V4"), ("buffer", "<i4"), ("offset", "<i4")])
"""A view of a value that is longer than `INLINE`: its size, first bytes, number of its buffer, place in it."""
INLINE = 12
"""The most bytes of a value that its view holds, after the size."""
MAX_BYTES = 2**31 - 1
"""The most bytes of one value."""
_LIST, _VIEWS = pa.list_(pa.int32()).id, pa.binary_view().id
_IMAGE = pa.binary(VIEW.itemsize)
"""The type that views are moved as: Arrow has no `take` for them yet."""


def is_blobs(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is that of a column of blobs, ragged or not."""
    return bool((kind.value_type.id if kind.id == _LIST else kind.id) == _VIEWS)


def encode_blobs(values: Sequence[Any]) -> pa.Array:
    """Encode values: bytes, or read-only buffers, which are referred to, or buffers that can be written to, which are
    copied. Equal ones are kept once. Raises `TypeError`, `ValueError`."""
    views = np.zeros(len(values), VIEW)
    images = views.view(np.uint8).reshape(-1, VIEW.itemsize)
    first: dict[bytes, int] = {}
    buffers: list[pa.Buffer] = []
    for number, value in enumerate(values):
        if not isinstance(value, bytes | bytearray | memoryview | pa.Buffer):
            raise TypeError(f"got {type(value).__name__}, where bytes are due")
        buffer = pa.py_buffer(value if memoryview(value).readonly else bytes(value))
        if buffer.size > MAX_BYTES:
            raise ValueError(f"{buffer.size} bytes, and one value has at most {MAX_BYTES}")
        if buffer.size > INLINE:
            same = first.setdefault(xxhash.xxh3_128_digest(buffer), number)
            if same != number and buffer.equals(buffers[views["buffer"][same]]):
                views[number] = views[same]
                continue
            buffers.append(buffer)
            views[number] = buffer.size, bytes(buffer[:4]), len(buffers) - 1, 0
        else:
            views["size"][number] = buffer.size
            images[number, 4 : 4 + buffer.size] = np.frombuffer(buffer, np.uint8)
    return pa.Array.from_buffers(pa.binary_view(), len(values), [None, pa.py_buffer(views), *buffers])


def take(array: pa.Array, positions: pa.Array) -> pa.Array:
    """The values of a column at these positions: what they view is not copied, and the rest is not referred to."""
    if not is_blobs(array.type):
        return array.take(positions)
    views = _values(array)
    moved = pa.Array.from_buffers(_IMAGE, len(views), views.buffers()[:2], offset=views.offset)
    if pa.types.is_list(array.type):
        offsets = array.buffers()[1]
        kind = pa.list_(_IMAGE)
        moved = pa.ListArray.from_buffers(kind, len(array), [None, offsets], offset=array.offset, children=[moved])
    moved = moved.take(positions)
    return compact(_like(array, moved, _values(moved), views.buffers()[2:]))


def compact(array: pa.Array) -> pa.Array:
    """The same values without the buffers that they do not name, each buffer once. Blobs are not copied."""
    if not is_blobs(array.type) or not len(_values(array).buffers()) > 2:
        return array
    inner = _values(array)
    if pa.types.is_list(array.type) and (array.offsets[0].as_py(), array.offsets[-1].as_py()) != (0, len(inner)):
        return take(array, pa.array(np.arange(len(array))))  # a part, with values of other rows
    views, buffers = views_of(inner).copy(), inner.buffers()[2:]
    is_long = views["size"] > INLINE
    numbers: dict[int, int] = {}
    kept: list[pa.Buffer] = []
    new = np.zeros(len(buffers), np.int32)
    for old in np.unique(views["buffer"][is_long]).tolist():
        new[old] = numbers.setdefault(buffers[old].address, len(kept))
        if new[old] == len(kept):
            kept.append(buffers[old])
    views["buffer"][is_long] = new[views["buffer"][is_long]]
    moved = pa.Array.from_buffers(_IMAGE, len(views), [None, pa.py_buffer(views)])
    return _like(array, array, moved, kept)


def blobs_of(array: pa.Array) -> list[memoryview]:
    """The values of an array of views, without a copy; equal views are one object."""
    views, buffers = views_of(array), array.buffers()
    memories = [memoryview(buffer) for buffer in buffers[2:]]
    images = memoryview(buffers[1] or b"").cast("B")[array.offset * VIEW.itemsize :]
    found: dict[tuple[int, int, int], memoryview] = {}
    values = []
    for number, (size, _, buffer, offset) in enumerate(views.tolist()):
        if size > INLINE:
            key = buffer, offset, size
            if key not in found:
                found[key] = memories[buffer][offset : offset + size]
            values.append(found[key])
        else:
            start = number * VIEW.itemsize + 4
            values.append(images[start : start + size])
    return values


def views_of(array: pa.Array) -> np.ndarray:
    """The views of an array of them: `[N]` of `VIEW`."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(0, VIEW)
    return np.frombuffer(buffer, VIEW, len(array), array.offset * VIEW.itemsize)


def row_bytes(array: pa.Array) -> np.ndarray:
    """Bytes of each row, `[N]` int64: a blob counts in the first row that has it."""
    views = views_of(_values(array))
    each = np.full(len(views), VIEW.itemsize, np.int64)
    is_long = np.flatnonzero(views["size"] > INLINE)
    places = (views["buffer"].astype(np.int64) << 32) + views["offset"]
    _, first = np.unique(places[is_long], return_index=True)
    each[is_long[first]] += views["size"][is_long[first]]
    if not pa.types.is_list(array.type):
        return each
    ends = np.concatenate([[0], np.cumsum(each)])[array.offsets.to_numpy()]
    return np.diff(ends) + 4


def _values(array: pa.Array) -> pa.Array:
    return array.values if pa.types.is_list(array.type) else array


def _like(array: pa.Array, rows: pa.Array, views: pa.Array, buffers: Sequence[pa.Buffer]) -> pa.Array:
    """An array of the type of `array`: these views and buffers, and if it is ragged the offsets of `rows`."""
    kind, pieces = pa.binary_view(), [None, views.buffers()[1], *buffers]
    inner = pa.Array.from_buffers(kind, len(views), pieces, offset=views.offset)
    if not pa.types.is_list(array.type):
        return inner
    pieces = [None, rows.buffers()[1]]
    return pa.ListArray.from_buffers(array.type, len(rows), pieces, offset=rows.offset, children=[inner])
