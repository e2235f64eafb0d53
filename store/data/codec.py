"""Batches and messages as plain data: notes that say where the Arrow buffers of a batch lie, and msgpack for all else.

    in a segment   file    │ offsets │ values │ offsets │ values │ …      each begins at a multiple of `ALIGN`
                   note    `SegmentRef`: segment, serial, rows, by column its type and (offset, bytes) of its buffers
    by value       body    msgpack, in which a batch is its note
                   pieces  the buffers one after the other, so that nothing copies them into the body

What `Codec.decode` returns has the type that was asked for, down to its last list, or `Malformed` is raised: nothing in
a message is run, and nothing is allocated but for what has arrived. Errors are the store's, by name.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Struct

from penstock.conf.errors import NotPlainData
from penstock.store.data.schema import ARROW_TYPES, take_rows
from penstock.store.errors import StoreError, error_named

ALIGN = 64
"""Alignment in bytes that Arrow recommends, so that vector instructions may be used."""
PIECE_ALIGN = 8
"""Size of the largest value of a column, in bytes."""
LARGE = 1 << 14
"""The smallest size of a piece that is sent as it is, in bytes; smaller ones are joined first."""
_EMPTY = pa.py_buffer(bytes(ALIGN))
"""The buffer of an array without entries."""
ByteRange = tuple[int, int]
"""Offset and length, in bytes."""
ColumnNote = tuple[str, str, tuple[ByteRange, ...]]
"""Name, type as Arrow prints it, buffers without the validity bitmaps, of which there are none."""
BatchNote = tuple[int, list[ColumnNote]]
"""Rows, and where the columns lie in the area."""
ArrayNote = tuple[list[int], bytes]
"""Shape and values of an array of int64."""
ErrorNote = tuple[str, str]
"""Name and message."""
Piece: TypeAlias = bytes | pa.Buffer
NOTHING: pa.Buffer = pa.py_buffer(b"")
"""The area of a message without batches."""


class SegmentRef(Struct, frozen=True, array_like=True, tag="placed"):
    """The place of a batch. Two that are equal are the same batch: `serial` counts what was ever written there."""

    segment: str
    serial: int
    num_rows: int
    columns: tuple[ColumnNote, ...]
    nbytes: int
    """Bytes up to the end of the last buffer."""
    node: str = ""
    """The node that the file lies on, of a run on several; the store's own has no name (`remote_rows.py`)."""

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.columns]


class InlineBatch(Struct, frozen=True, array_like=True, tag="inline"):
    """A batch that goes by value."""

    batch: pa.RecordBatch


SentBatch: TypeAlias = InlineBatch | SegmentRef
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
        array = take_rows(array, pa.array(np.arange(len(array))))
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


class Malformed(ConnectionAbortedError):
    """Received bytes that are no message: the sender speaks something else, or they were damaged."""


class Codec:
    """The encoder and decoder of one end of a connection. Not thread-safe."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._note)
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._pieces: list[Piece] = []
        self._nbytes = 0
        self._area = NOTHING

    def encode(self, message: Any) -> tuple[bytes, list[Piece], int]:
        """Encode a message. Returns body, pieces and the bytes that these have together. Raises `NotPlainData`."""
        self._pieces, self._nbytes = [], 0
        try:
            body = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise NotPlainData(f"it is no plain data: {error}") from error
        pieces, self._pieces = self._pieces, []
        return body, pieces, self._nbytes

    def decode(self, kind: Any, body: "bytes | memoryview | msgspec.Raw", area: pa.Buffer) -> Any:
        """Decode a message of that type. Its batches lie in the area. Raises `Malformed`."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=self._value)
        self._area = area
        try:
            return decoder.decode(body)
        except Exception as error:  # whatever is wrong with it, it is none of ours
            raise Malformed(f"no message of the store: {type(error).__name__}: {error}") from error
        finally:
            self._area = NOTHING  # a codec and its decoders refer to each other, and would hold on to it

    def _note(self, value: Any) -> "BatchNote | ArrayNote | ErrorNote":
        """Encode a value that msgpack does not know as a note."""
        if isinstance(value, pa.RecordBatch):
            return value.num_rows, notes_of(value, self._put)
        if isinstance(value, np.ndarray) and value.dtype == np.int64:
            return list(value.shape), value.tobytes()
        if isinstance(value, StoreError):
            return type(value).__name__, str(value)
        raise TypeError(type(value).__name__)

    def _value(self, kind: type, note: Any) -> Any:
        if kind is pa.RecordBatch:
            num_rows, columns = msgspec.convert(note, BatchNote)
            batch = read(num_rows, columns, partial(piece_of, self._area))
            batch.validate(full=True)
            return batch
        if kind is np.ndarray:
            shape, values = msgspec.convert(note, ArrayNote)
            return np.frombuffer(values, dtype=np.int64).reshape(shape)
        if issubclass(kind, StoreError):
            return error_named(*msgspec.convert(note, ErrorNote))
        raise TypeError(kind.__name__)

    def _put(self, buffer: pa.Buffer) -> ByteRange:
        start = self._nbytes
        self._pieces.append(buffer)
        self._nbytes += buffer.size
        if rest := -buffer.size % PIECE_ALIGN:
            self._pieces.append(bytes(rest))
            self._nbytes += rest
        return start, buffer.size


def piece_of(area: pa.Buffer, offset: int, length: int) -> pa.Buffer:
    """A piece of a buffer. Raises `ValueError` if it does not lie in it."""
    if not 0 <= offset <= offset + length <= area.size:
        raise ValueError(f"{length} bytes from {offset} of {area.size}")
    return area.slice(offset, length)


def joined(head: bytes, pieces: list[Piece]) -> list[bytes | memoryview]:
    """Join the message into a few pieces, the first of which begins with `head`."""
    few: list[bytes | memoryview] = []
    small: list[Piece] = [head]
    for piece in pieces:
        if len(piece) < LARGE:
            small.append(piece)
            continue
        few += [b"".join(small), memoryview(piece)]
        small = []
    return [*few, b"".join(small)] if small else few
