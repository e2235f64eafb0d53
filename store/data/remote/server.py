"""The batches of one node for readers on others: spans of rows and columns, written to the connection right from the
mapping of their file.

    reader ─ Pull(Wanted, …) ─▶ server ─ note, buffers ─▶ reader
    store ─ Orders(Remove | Spill | Sweep | Preallocate, …) ─▶ server ─ done ─▶ store

A file that is asked for is in use: the store counts the reader from the moment that it was told of it until it has the
values, so nothing here changes or goes while it is read. One server is the store's own (`service/server.py`), which
needs no orders; the others are the agents' (`workers/node/agent.py`).
"""

import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from msgspec import Struct

from penstock.network.connection import Connection, Frame
from penstock.network.names import OutsideName, checked
from penstock.store.data.arena import preallocate
from penstock.store.data.codec import NOTHING, Codec, Malformed, joined
from penstock.store.data.layout import Placed, read
from penstock.store.data.mappings import map_file
from penstock.store.data.moving import move
from penstock.store.data.payload import rows_at
from penstock.store.data.roots import claim_root, guard_root, remove_root

PULL, ORDERS, DONE, FAILED, GONE = range(5)
"""Kinds of messages."""


class Wanted(Struct, frozen=True, array_like=True):
    """Rows of the columns `names` of a batch. `places`: `[K, 3]` int64, start, stride and count of each."""

    placed: Placed
    names: list[str]
    places: np.ndarray

    @property
    def num_rows(self) -> int:
        return int(self.places[:, 2].sum())

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Take these rows, and no more, of `batch`: those columns of all rows."""
        zeros = np.zeros((len(self.places), 1), dtype=np.int64)
        return rows_at([batch], self.names, np.hstack([zeros, self.places]), compact=True)


class Remove(Struct, frozen=True, array_like=True, tag="remove"):
    """Remove a file that no process needs any more."""

    name: str


class Spill(Struct, frozen=True, array_like=True, tag="spill"):
    """Move a file to disk: shared memory is over its budget."""

    name: str


class Sweep(Struct, frozen=True, array_like=True, tag="sweep"):
    """Remove what a writer that is gone has not handed over. `kept`: what it has."""

    writer: str
    kept: list[str]


class Preallocate(Struct, frozen=True, array_like=True, tag="preallocate"):
    """Preallocate files: writers of this node have joined. `max_bytes`: their budget."""

    max_bytes: int


Order = Remove | Spill | Sweep | Preallocate


class RowsServer:
    """A server of one node's files. Lifecycle: `serve` each connection, in a thread of its own; `close`. `places`:
    directories of the files, in shared memory and on disk. `takes_orders`: the store says what becomes of files, and
    the directory on disk is made when there is something for it."""

    def __init__(self, places: tuple[str, str], *, takes_orders: bool) -> None:
        self._memory, self._disk = map(Path, places)
        self._takes_orders = takes_orders
        self._files: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        self.sent_bytes = 0
        self.failed_spills = 0
        """Files that the disk had no room for: they stay in shared memory."""

    def serve(self, connected: socket.socket) -> None:
        """Serve a connection of a reader or of the store, until it ends."""
        with Connection(connected) as connection:
            connected.settimeout(None)  # it may ask nothing for long; the kernel says when it is gone
            codec = Codec()
            with suppress(OSError):  # it has what it wanted, or is gone, or speaks something else
                while True:
                    self._answer(connection, codec, connection.receive())

    def forget(self, names: Iterable[str]) -> None:
        """Forget files that were removed or moved: their pages go with the last answer that is sent from them."""
        with self._lock:
            for name in names:
                self._files.pop(name, None)

    def clear(self) -> None:
        """Remove all files, whichever process has written them."""
        self._files.clear()
        for place in (self._memory, self._disk):
            for file in place.glob("*"):
                with suppress(OSError):  # a directory, or gone meanwhile
                    file.unlink()

    def close(self) -> None:
        self._files.clear()
        if self._takes_orders:
            remove_root(self._disk)

    def _answer(self, connection: Connection, codec: Codec, asked: Frame) -> None:
        if asked.kind == ORDERS and self._takes_orders:
            for order in codec.decode(list[Order], asked.body, NOTHING):
                self._carry_out(order)
            connection.send(DONE)
            return
        if asked.kind != PULL:
            raise Malformed(f"a rows server is sent a message of kind {asked.kind}.")
        wanted: Sequence[Wanted] = codec.decode(list[Wanted], asked.body, NOTHING)
        try:
            batches = [one.of(self._batch(one.placed, one.names)) for one in wanted]
        except FileNotFoundError as error:  # as after the death of the store that has granted them
            connection.send(GONE, str(error).encode())
            return
        except (OSError, LookupError, ValueError, MemoryError) as error:  # Arrow's are among them
            connection.send(FAILED, f"{type(error).__name__}: {error}".encode())
            return
        body, pieces, num_bytes = codec.encode(batches)
        with self._lock:
            self.sent_bytes += num_bytes
        connection.send(DONE, body, num_bytes)
        for piece in joined(b"", pieces):
            connection.send_bytes(piece)

    def _batch(self, placed: Placed, names: Sequence[str]) -> pa.RecordBatch:
        memory = pa.py_buffer(self._mapped(placed.segment, placed.nbytes))
        columns = [column for column in placed.columns if column[0] in names]

        def buffer(offset: int, length: int) -> pa.Buffer:
            if not 0 <= offset <= offset + length <= memory.size:
                raise ValueError(f"{length} bytes from {offset} of a segment of {memory.size}")
            return memory.slice(offset, length)

        batch = read(placed.num_rows, columns, buffer)
        batch.validate()
        return batch

    def _mapped(self, name: str, num_bytes: int) -> np.ndarray:
        with self._lock:  # also while it is mapped: what is removed meanwhile is forgotten after that
            memory = self._files.get(name)
            if memory is None or len(memory) < num_bytes:
                memory = self._files[name] = self._map(_checked(name))
            return memory

    def _map(self, name: str) -> np.ndarray:
        for place in (self._memory, self._disk):
            with suppress(FileNotFoundError), (place / name).open("rb") as file:
                return map_file(file.fileno())
        raise FileNotFoundError(f"segment {name} is in neither {self._memory} nor {self._disk}: its rows have ended.")

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Spill):
            self._spill(_checked(order.name))
            return
        if isinstance(order, Preallocate):
            preallocate(str(self._memory), order.max_bytes)
            return
        if isinstance(order, Remove):
            gone = [_checked(order.name)]
        else:
            found = self._memory.glob(f"{_checked(order.writer)}-*")
            gone = sorted({file.name for file in found} - set(order.kept))
        for name in gone:
            for place in (self._memory, self._disk):
                with suppress(FileNotFoundError):
                    (place / name).unlink()
        self.forget(gone)

    def _spill(self, name: str) -> None:
        try:
            if not self._disk.exists():
                claim_root(self._disk)
                guard_root(self._disk)
            move(self._memory / name, self._disk / name)
        except OSError:
            self.failed_spills += 1
        self.forget([name])


def _checked(name: str) -> str:
    try:
        return checked(name)
    except OutsideName as error:
        raise Malformed(str(error)) from None
