"""Large batches that lie on other nodes of a run: they stay where their writer has put them, and are pulled from there.

    writer ─ file ─▶ its node's directory     ─ `SegmentRef`, facts ─▶ store     the store never sees the bytes
    reader ─ RowsRequest, … ─▶ its node's `RowsServer` ─ note, buffers ─▶ reader
    store ─ RemoveOrder | SpillOrder | SweepOrder | PreallocateOrder, … ─▶ `RowsServer` ─ done ─▶ store

`RemoteReader` reads several batches of a node in one request, of several nodes at the same time, over connections that
are kept: of each batch those rows and columns that the payload takes of it. They are written to the connection right
from the mapping of their file. A file that is asked for is in use: the store counts the reader from the moment that it
names the file until the reader has the values, so nothing here changes or goes while it is read.

`NodeOrders` say what becomes of a node's files. One server is the store's own (`service/store_server.py`), which needs
no orders; the others are the agents' (`workers/node/node_agent.py`). The creator of the store tells it the nodes
(`RowsNodes`), and the store its clients.
"""

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from penstock.network.connection import Address, Connection, Frame, connect
from penstock.network.names import OutsideName, checked
from penstock.store.data.block_index import Payload, rows_at
from penstock.store.data.codec import (
    NOTHING,
    Codec,
    InlineBatch,
    Malformed,
    SegmentRef,
    SentBatch,
    joined,
    piece_of,
    read,
)
from penstock.store.data.roots import claim_root, guard_root, remove_root
from penstock.store.data.segment_files import map_segment, move, preallocate
from penstock.store.errors import RowsLost, RowsUnreachable, StoreError

ROWS = 2
"""The number of the service of a rows server (`network/listener.py`)."""
PULL, ORDERS, DONE, FAILED, GONE = range(5)
"""Kinds of messages."""
CONNECT_S = 10.0
PATIENCE_S = 60.0
"""Seconds for which a node is tried. One that cannot be reached for so long is gone, and its shared memory with it: it
gets no more orders."""
PAUSE_S = 1.0
MOST_ORDERS = 1000
"""The most orders in one message."""
AT_ONCE = 16
"""The most requests of one process that are under way."""
MOST_IDLE = 4
"""The most connections to a node that wait for the next request."""
SourceSpan = tuple[int, int, int, int]
"""Source, start, stride, count: see `payload.Columns`."""


@dataclass(frozen=True)
class RowsNode:
    """A node, or several that share their memory."""

    id: str
    """The name that segments which lie here say."""
    places: tuple[str, str]
    """Directories of segments: shared memory, disk."""
    address: Address
    """Address of its rows server."""


@dataclass(frozen=True)
class RowsNodes:
    """All nodes of a run, by Ray's id. `token`: the one that their servers ask for."""

    by_id: Mapping[str, RowsNode] = field(default_factory=dict)
    token: bytes = field(default=b"", repr=False)

    @property
    def addresses(self) -> dict[str, Address]:
        """Addresses of the rows servers, by the node's name in segments."""
        return {node.id: node.address for node in self.by_id.values()}

    def without(self, node: str) -> "RowsNodes":
        """Return all nodes but one that was lost. If it returns, its clients are as those of nodes that
        come later: what they write goes to the store."""
        return RowsNodes({other: its for other, its in self.by_id.items() if its.id != node}, self.token)

    def shares_memory(self, one: str, other: str) -> bool:
        """Return whether two of Ray's nodes see the same files."""
        if one == other:
            return True
        return one in self.by_id and other in self.by_id and self.by_id[one].id == self.by_id[other].id


class RowsRequest(Struct, frozen=True, array_like=True):
    """Rows of the columns `names` of a batch. `places`: `[K, 3]` int64, start, stride and count of each."""

    placed: SegmentRef
    names: list[str]
    places: np.ndarray

    @property
    def num_rows(self) -> int:
        return int(self.places[:, 2].sum())

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Take these rows, and no more, of `batch`: those columns of all rows."""
        zeros = np.zeros((len(self.places), 1), dtype=np.int64)
        return rows_at([batch], self.names, np.hstack([zeros, self.places]), compact=True)


class RemoveOrder(Struct, frozen=True, array_like=True, tag="remove"):
    """Remove a file that no process needs any more."""

    name: str


class SpillOrder(Struct, frozen=True, array_like=True, tag="spill"):
    """Move a file to disk: shared memory is over its budget."""

    name: str


class SweepOrder(Struct, frozen=True, array_like=True, tag="sweep"):
    """Remove files that a writer that is gone has not handed over. `kept`: those that it has."""

    writer: str
    kept: list[str]


class PreallocateOrder(Struct, frozen=True, array_like=True, tag="preallocate"):
    """Preallocate files: writers of this node have joined. `max_bytes`: their budget."""

    max_bytes: int


Order = RemoveOrder | SpillOrder | SweepOrder | PreallocateOrder


class RowsServer:
    """A server of one node's files. Lifecycle: `serve` each connection, in a thread of its own; `close`. `places`:
    directories of the files, in shared memory and on disk. `takes_orders`: the store says what becomes of files, and
    the directory on disk is made when there is something for it."""

    def __init__(self, places: tuple[str, str], *, takes_orders: bool) -> None:
        self._places = places
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
            with suppress(OSError):  # it is done, or gone, or speaks another protocol
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
        wanted: Sequence[RowsRequest] = codec.decode(list[RowsRequest], asked.body, NOTHING)
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

    def _batch(self, placed: SegmentRef, names: Sequence[str]) -> pa.RecordBatch:
        memory = pa.py_buffer(self._mapped(placed.segment, placed.nbytes))
        columns = [column for column in placed.columns if column[0] in names]
        batch = read(placed.num_rows, columns, partial(piece_of, memory))
        batch.validate()
        return batch

    def _mapped(self, name: str, num_bytes: int) -> np.ndarray:
        with self._lock:  # also while it is mapped: what is removed meanwhile is forgotten after that
            memory = self._files.get(name)
            if memory is None or len(memory) < num_bytes:
                memory = self._files[name] = map_segment(self._places, _checked(name))
            return memory

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, SpillOrder):
            self._spill(_checked(order.name))
            return
        if isinstance(order, PreallocateOrder):
            preallocate(str(self._memory), order.max_bytes)
            return
        if isinstance(order, RemoveOrder):
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


class NodeOrders:
    """The orders to all nodes about their files, sent to each node in order, and carried out by its rows server.
    Lifecycle: `give` any number of times, `close`.

    No process waits for it: a file that is removed late costs memory for that long, and nothing else. Each node has its
    own thread, so one that hangs holds up no other.
    """

    def __init__(self, nodes: RowsNodes) -> None:
        self._addresses, self._token = nodes.addresses, nodes.token
        self._to: dict[str, queue.SimpleQueue[Order | None]] = {}
        self._closed = threading.Event()
        self._gone_nodes: set[str] = set()
        """Nodes that get no more orders."""
        self.lost = 0
        """Orders to nodes that were gone."""

    def give(self, node: str, order: Order) -> None:
        """Give an order. It is carried out after those that this node was given before."""
        waiting = self._to.get(node)
        if waiting is None:
            waiting = self._to[node] = queue.SimpleQueue()
            arguments = node, waiting
            threading.Thread(target=self._send_all, args=arguments, name="orders", daemon=True).start()
        waiting.put(order)

    def node_lost(self, node: str) -> None:
        """Count a node as gone from now on, whether it can be reached or not."""
        self._gone_nodes.add(node)

    def close(self) -> None:
        """Tell nothing any more: the nodes remove what they have at the end of the run."""
        self._closed.set()
        for waiting in self._to.values():
            waiting.put(None)

    def _send_all(self, node: str, waiting: "queue.SimpleQueue[Order | None]") -> None:
        connection: Connection | None = None
        while (order := waiting.get()) is not None:
            together = [order]
            while len(together) < MOST_ORDERS and not waiting.empty():
                if (order := waiting.get()) is None:
                    waiting.put(None)
                    break
                together.append(order)
            connection = self._send(node, connection, together)
            if connection is None:
                self._gone_nodes.add(node)
                self.lost += len(together)
        if connection is not None:
            connection.close()

    def _send(self, node: str, connection: Connection | None, orders: list[Order]) -> Connection | None:
        """Send orders. Returns the connection that they were sent over; None if the node is gone. Orders may be sent
        twice."""
        address, body = self._addresses[node], Codec().encode(orders)[0]
        give_up = time.monotonic() + PATIENCE_S
        while not self._closed.is_set() and node not in self._gone_nodes:
            try:
                connection = connection or connect(address, ROWS, self._token, CONNECT_S)
                connection.send(ORDERS, body)
                if connection.receive().kind == DONE:
                    return connection
                raise ConnectionAbortedError(f"{address} does not take orders.")
            except OSError:
                if connection is not None:
                    connection.close()
                    connection = None
                if time.monotonic() > give_up:
                    return None
                self._closed.wait(PAUSE_S)
        if connection is not None and node in self._gone_nodes:
            connection.close()
            return None
        return connection


class RemoteReader:
    """A reader of other nodes. Lifecycle: `fetch` and `fetch_blocking` any number of times, from any thread; `close`.
    `addresses`: of the rows servers, by the node's name in segments."""

    def __init__(self, addresses: Mapping[str, Address], token: bytes, node: str | None = "") -> None:
        """`node`: this one, as segments say it, whose batches are not pulled; None: one that has none."""
        self._addresses, self._token, self._node = addresses, token, node
        self._lock = threading.Lock()
        self._idle: dict[str, list[Connection]] = {node: [] for node in addresses}
        self._threads: ThreadPoolExecutor | None = None

    async def fetch(self, payload: Payload) -> Payload:
        """Return the payload with the values of its remote sources in their place. Raises `RowsUnreachable`,
        `StoreError`."""
        wanted, rest = split_remote(payload, self._node)
        if self._threads is None:  # not the event loop's, where other calls wait
            self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull")
        loop, nodes = asyncio.get_running_loop(), _by_node(wanted)
        pulling = [loop.run_in_executor(self._threads, self._pull, node, some) for node, some in nodes.items()]
        return _with_answers(rest, wanted, dict(zip(nodes, await asyncio.gather(*pulling), strict=True)))

    def fetch_blocking(self, payload: Payload) -> Payload:
        """Fetch as `fetch` does, one node after the other."""
        wanted, rest = split_remote(payload, self._node)
        answers = {node: self._pull(node, some) for node, some in _by_node(wanted).items()}
        return _with_answers(rest, wanted, answers)

    def close(self) -> None:
        """Close kept connections. Nothing is fetched any more; what is, would connect anew."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
                connections.clear()

    def _pull(self, node: str, wanted: list[RowsRequest]) -> list[pa.RecordBatch]:
        if node not in self._addresses:
            raise RowsUnreachable(f"rows lie on node {node!r}, which this process does not know.")
        request = Codec().encode(wanted)[0]
        connection = self._take_idle(node)
        if connection is not None:
            try:
                return self._exchange(node, connection, request, wanted)
            except ConnectionError:  # it may have ended while it was idle
                pass
            except OSError as error:
                raise self._unreachable(node, error) from None
        try:
            connection = connect(self._addresses[node], ROWS, self._token, CONNECT_S)
            return self._exchange(node, connection, request, wanted)
        except OSError as error:
            raise self._unreachable(node, error) from None

    def _exchange(
        self, node: str, connection: Connection, request: bytes, wanted: Sequence[RowsRequest]
    ) -> list[pa.RecordBatch]:
        """Ask over a connection. Returns the answer; the connection is kept if there was one, and closed otherwise."""
        try:
            connection.send(PULL, request)
            answer = connection.receive()
            if answer.kind == GONE:
                raise RowsLost(f"rows of node {node}: {answer.body.decode(errors='replace')}")
            if answer.kind == FAILED:
                raise StoreError(f"rows of node {node} cannot be read: {answer.body.decode(errors='replace')}.")
            if answer.kind != DONE:
                raise Malformed(f"a rows server answers with a message of kind {answer.kind}.")
            area = np.empty(answer.num_bytes, dtype=np.uint8)
            connection.receive_into(area.data)
            batches: list[pa.RecordBatch] = Codec().decode(list[pa.RecordBatch], answer.body, pa.py_buffer(area))
            for one, batch in zip(wanted, batches, strict=True):
                if batch.num_rows != one.num_rows or batch.schema.names != one.names:
                    raise Malformed(f"{batch.num_rows} rows of {batch.schema.names} instead of {one.num_rows}.")
        except BaseException:
            connection.close()
            raise
        with self._lock:
            kept = self._idle[node]
            if len(kept) < MOST_IDLE:
                kept.append(connection)
                return batches
        connection.close()
        return batches

    def _take_idle(self, node: str) -> Connection | None:
        with self._lock:
            kept = self._idle[node]
            return kept.pop() if kept else None

    def _unreachable(self, node: str, error: OSError) -> RowsUnreachable:
        return RowsUnreachable(
            f"rows on node {node} at {self._addresses[node]} cannot be read: {type(error).__name__}: {error}. See "
            "whether the machine and the network are well, and that a firewall lets this machine through: "
            "cluster.ports=[20000,20099] keeps to a range of ports."
        )


def _by_node(wanted: Sequence[RowsRequest]) -> dict[str, list[RowsRequest]]:
    nodes: dict[str, list[RowsRequest]] = {}
    for one in wanted:
        nodes.setdefault(one.placed.node, []).append(one)
    return nodes


def _with_answers(rest: Payload, wanted: Sequence[RowsRequest], answers: Mapping[str, list[pa.RecordBatch]]) -> Payload:
    """Return the payload with what was pulled. `answers`: by node, in the order of what was wanted of it."""
    left = {node: iter(batches) for node, batches in answers.items()}
    return with_remote(rest, [next(left[one.placed.node]) for one in wanted])


def split_remote(payload: Payload, node: str | None) -> tuple[list[RowsRequest], Payload]:
    """Return what is to be pulled, and the payload without its remote sources, those that are not of `node`: what is
    pulled follows its own, in this order. A value that several rows share is pulled once."""
    local: list[SentBatch] = []
    number_of: dict[int, int] = {}
    """New number of each local source."""
    for number, source in enumerate(payload.sources):
        if isinstance(source, InlineBatch) or source.node == node:
            number_of[number] = len(local)
            local.append(source)
    wanted: list[tuple[Any, list[str], list[tuple[int, int, int]]]] = []
    columns = []
    for names, places in payload.columns:
        here: list[SourceSpan] = []
        pulled: dict[int, tuple[int, int]] = {}
        """Number of each source among what is wanted, and its rows so far."""
        for source, start, stride, count in places.tolist():
            if source in number_of:
                here.append((number_of[source], start, stride, count))
                continue
            if source not in pulled:
                pulled[source] = len(wanted), 0
                wanted.append((payload.sources[source], names, []))
            number, taken = pulled[source]
            num_rows = count if stride else min(count, 1)
            wanted[number][2].append((start, stride or 1, num_rows))
            pulled[source] = number, taken + num_rows
            _append_joined(here, (len(local) + number, taken, min(stride, 1), count))
        columns.append((names, np.asarray(here, dtype=np.int64).reshape(-1, 4)))
    asked = [RowsRequest(placed, names, np.asarray(spots, dtype=np.int64)) for placed, names, spots in wanted]
    return asked, Payload(payload.row_ids, payload.group_ids, local, columns)


def with_remote(payload: Payload, pulled: Sequence[pa.RecordBatch]) -> Payload:
    sources: list[SentBatch] = [*payload.sources, *map(InlineBatch, pulled)]
    return Payload(payload.row_ids, payload.group_ids, sources, payload.columns)


def _append_joined(places: list[SourceSpan], place: SourceSpan) -> None:
    """Add a place, joined with the last one that it follows in the same batch: it is read without a copy then."""
    if places and place[2]:
        source, start, stride, count = places[-1]
        if stride and source == place[0] and start + count == place[1]:
            places[-1] = source, start, stride, count + place[3]
            return
    places.append(place)
