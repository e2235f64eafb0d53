"""The layout of a batch in a segment: its Arrow buffers one after the other, and `Placed`, the note that says where.

    file   │ offsets │ values │ offsets │ values │ …      each begins at a multiple of `ALIGN`
    note   segment and serial, rows, by column its type and the (offset, bytes) of its buffers

The note travels in the calls, the bytes do not. `arena.py` writes them, `mappings.py` reads them. A batch that goes by
value has such a note too (`codec.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from msgspec import Struct

from penstock.store.data.blobs import take
from penstock.store.data.schema import ARROW_TYPES

ALIGN = 64
"""Alignment in bytes that Arrow recommends, so that vector instructions may be used."""

_EMPTY = pa.py_buffer(bytes(ALIGN))
"""The buffer of an array without entries."""

ByteRange = tuple[int, int]
"""Offset and length, in bytes."""
ColumnNote = tuple[str, str, tuple[ByteRange, ...]]
"""Name, type as Arrow prints it, buffers without the validity bitmaps, of which there are none."""


class Placed(Struct, frozen=True, array_like=True, tag="placed"):
    """The place of a batch. Two that are equal are the same batch: `serial` counts what was ever written there."""

    segment: str
    serial: int
    num_rows: int
    columns: tuple[ColumnNote, ...]
    nbytes: int
    """Bytes up to the end of the last buffer."""
    node: str = ""
    """The node that the file lies on, of a run on several; the store's own has no name (`remote/nodes.py`)."""

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.columns]


class Inline(Struct, frozen=True, array_like=True, tag="inline"):
    """A batch that goes by value."""

    batch: pa.RecordBatch


SentBatch: TypeAlias = Inline | Placed
"""A batch on its way: by value, or where it lies."""


def kind_of(kind: pa.DataType) -> str:
    """Name of a type as Arrow prints it, which takes its time for that."""
    return _KINDS.get(_ids(kind)) or str(kind)


def _ids(kind: pa.DataType) -> tuple[int, int]:
    return kind.id, kind.value_type.id if pa.types.is_list(kind) else 0


_KINDS = {_ids(kind): name for name, kind in ARROW_TYPES.items()}


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def buffers_of(array: pa.Array) -> list[pa.Buffer]:
    """Buffers of an array without nulls, level by level, the validity of each left out."""
    if array.offset or (pa.types.is_list(array.type) and array.values.offset):
        array = take(array, pa.array(np.arange(len(array))))
    if pa.types.is_list(array.type):
        return [array.buffers()[1] or _EMPTY, *buffers_of(array.values)]
    return [buffer or _EMPTY for buffer in array.buffers()[1:]]


def notes_of(batch: pa.RecordBatch, put: Callable[[pa.Buffer], ByteRange]) -> list[ColumnNote]:
    """Notes of a batch whose buffers are put somewhere one after the other."""
    return [
        (name, kind_of(array.type), tuple(map(put, buffers_of(array))))
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
    ]


def read(num_rows: int, columns: Sequence[ColumnNote], buffer: Callable[[int, int], pa.Buffer]) -> pa.RecordBatch:
    """The batch, without a copy. `buffer(offset, length)`: a piece of what it lies in. Raises `KeyError` or
    `ValueError` for notes that make no sense."""
    arrays, names = [], []
    for name, kind, spans in columns:
        pieces = (buffer(offset, length) for offset, length in spans)
        arrays.append(_array(ARROW_TYPES[kind], num_rows, pieces))
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _array(kind: pa.DataType, length: int, pieces: Iterator[pa.Buffer]) -> pa.Array:
    if pa.types.is_list(kind):
        offsets = next(pieces)
        count = int(np.frombuffer(offsets, dtype=np.int32, count=length + 1)[-1]) if length else 0
        values = _array(kind.value_type, count, pieces)
        return pa.ListArray.from_buffers(kind, length, [None, offsets], children=[values])
    if pa.types.is_string(kind):
        return pa.StringArray.from_buffers(length, next(pieces), next(pieces))
    return pa.Array.from_buffers(kind, length, [None, *pieces])
