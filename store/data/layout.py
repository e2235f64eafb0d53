"""How a batch lies in a segment: its Arrow buffers one after the other, and `Placed`, the note that says where.

    file   │ offsets │ values │ offsets │ values │ …      each begins at a multiple of `ALIGN`
    note   segment and serial, rows, by column its type and the (offset, bytes) of its buffers

The note travels in the calls, the bytes do not. Written by `arena.py`, read by `mappings.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from penstock.store.data.schema import ARROW_TYPES

ALIGN = 64
"""What Arrow recommends, so that vector instructions may be used."""

_EMPTY = pa.py_buffer(bytes(ALIGN))
"""Of an array without entries."""

ByteRange = tuple[int, int]
"""Offset and length, in bytes."""


@dataclass(frozen=True)
class Placed:
    """Where a batch lies. Two that are equal are the same batch: `serial` counts what was ever written there."""

    segment: str
    serial: int
    num_rows: int
    columns: tuple[tuple[str, str, tuple[ByteRange, ...]], ...]
    """Name, type as Arrow prints it, buffers without the validity bitmaps, of which there are none."""
    nbytes: int
    """Up to the end of the last buffer."""

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.columns]


Parcel: TypeAlias = "pa.RecordBatch | Placed"
"""A batch on its way: by value, or where it lies."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def buffers_of(array: pa.Array) -> list[pa.Buffer]:
    """Those of an array without nulls, level by level, the validity of each left out."""
    if array.offset or (pa.types.is_list(array.type) and array.values.offset):
        array = array.take(pa.array(np.arange(len(array))))
    if pa.types.is_list(array.type):
        return [array.buffers()[1] or _EMPTY, *buffers_of(array.values)]
    return [buffer or _EMPTY for buffer in array.buffers()[1:]]


def read(placed: Placed, buffer: Callable[[int, int], pa.Buffer]) -> pa.RecordBatch:
    """The batch, without a copy. `buffer(offset, length)`: a piece of the segment."""
    arrays = []
    for _, kind, spans in placed.columns:
        pieces = (buffer(offset, length) for offset, length in spans)
        arrays.append(_array(ARROW_TYPES[kind], placed.num_rows, pieces))
    return pa.RecordBatch.from_arrays(arrays, names=placed.names)


def _array(kind: pa.DataType, length: int, pieces: Iterator[pa.Buffer]) -> pa.Array:
    if pa.types.is_list(kind):
        offsets = next(pieces)
        count = int(np.frombuffer(offsets, dtype=np.int32, count=length + 1)[-1]) if length else 0
        values = _array(kind.value_type, count, pieces)
        return pa.ListArray.from_buffers(kind, length, [None, offsets], children=[values])
    if pa.types.is_string(kind):
        return pa.StringArray.from_buffers(length, next(pieces), next(pieces))
    return pa.Array.from_buffers(kind, length, [None, next(pieces)])
