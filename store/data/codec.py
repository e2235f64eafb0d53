"""Messages as plain data: msgpack, with the buffers of batches beside it, so that nothing copies them into it.

    message ─ encode ─▶ body (msgpack; a batch is its note) and pieces (buffers one after the other)
    message ◀─ decode ─ body, area (the pieces as they came)

What comes out has the type that was asked for, down to its last list, or `Malformed` is raised: nothing in a message is
run, and nothing is allocated but for what has come. Errors are the store's, by name.
"""

from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from penstock.conf.errors import NotPlainData
from penstock.store.data.layout import ByteRange, ColumnNote, notes_of, read
from penstock.store.errors import StoreError, named

ALIGN = 8
"""Size of the largest value of a column, in bytes."""
LARGE = 1 << 14
"""The smallest size of a piece that is sent as it is, in bytes; smaller ones are joined first."""

BatchNote = tuple[int, list[ColumnNote]]
"""Rows, and where the columns lie in the area."""
ArrayNote = tuple[list[int], bytes]
"""Shape and values of an array of int64."""
ErrorNote = tuple[str, str]
"""Name and message."""
Piece: TypeAlias = bytes | pa.Buffer
NOTHING: pa.Buffer = pa.py_buffer(b"")
"""The area of a message without batches."""


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
            batch = read(num_rows, columns, self._piece)
            batch.validate(full=True)
            return batch
        if kind is np.ndarray:
            shape, values = msgspec.convert(note, ArrayNote)
            return np.frombuffer(values, dtype=np.int64).reshape(shape)
        if issubclass(kind, StoreError):
            return named(*msgspec.convert(note, ErrorNote))
        raise TypeError(kind.__name__)

    def _put(self, buffer: pa.Buffer) -> ByteRange:
        start = self._nbytes
        self._pieces.append(buffer)
        self._nbytes += buffer.size
        if rest := -buffer.size % ALIGN:
            self._pieces.append(bytes(rest))
            self._nbytes += rest
        return start, buffer.size

    def _piece(self, offset: int, length: int) -> pa.Buffer:
        if not 0 <= offset <= offset + length <= self._area.size:
            raise ValueError(f"{length} bytes from {offset} of {self._area.size}")
        return self._area.slice(offset, length)


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
