"""Pulls: reads from other nodes, several batches of a node in one request, several nodes at the same time, over
connections that are kept.

    pulls = Pulls(addresses, token)
    payload = await pulls.fetch(payload, is_remote)     or `fetch_blocking`, in a thread

    Payload ─ split ─▶ Wanted, … and the payload as it will be ─ with_pulled ─▶ Payload whose remote batches are here

Of each batch those rows and columns are asked for that the payload takes of it. The other end is `server.py`.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.network.connection import Address, Connection, connect
from penstock.store.data.codec import Codec, Malformed
from penstock.store.data.layout import Inline, Placed, SentBatch
from penstock.store.data.payload import Payload
from penstock.store.data.remote.nodes import ROWS
from penstock.store.data.remote.server import DONE, FAILED, GONE, PULL, Wanted
from penstock.store.errors import RowsLost, RowsUnreachable, StoreError

CONNECT_S = 10.0
AT_ONCE = 16
"""The most requests of one process that are under way."""
KEPT = 4
"""The most connections to a node that wait for the next request."""
Place = tuple[int, int, int, int]
"""Source, start, stride, count: see `payload.Columns`."""


class Pulls:
    """A reader of other nodes. Lifecycle: `fetch` and `fetch_blocking` any number of times, from any thread; `close`.
    `addresses`: of the rows servers, by the node's name in segments."""

    def __init__(self, addresses: Mapping[str, Address], token: bytes) -> None:
        self._addresses, self._token = addresses, token
        self._lock = threading.Lock()
        self._kept: dict[str, list[Connection]] = {node: [] for node in addresses}
        self._threads: ThreadPoolExecutor | None = None

    async def fetch(self, payload: Payload, is_remote: Callable[[Placed], bool]) -> Payload:
        """Return the payload with the values of its remote sources in their place. Raises `RowsUnreachable`,
        `StoreError`."""
        wanted, rest = split(payload, is_remote)
        if self._threads is None:  # of its own: others wait in the event loop's
            self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull")
        loop, nodes = asyncio.get_running_loop(), _by_node(wanted)
        pulling = [
            loop.run_in_executor(self._threads, self._pull, node, [wanted[number] for number in numbers])
            for node, numbers in nodes.items()
        ]
        answers = await asyncio.gather(*pulling)
        return with_pulled(rest, _in_order(len(wanted), nodes, answers))

    def fetch_blocking(self, payload: Payload, is_remote: Callable[[Placed], bool]) -> Payload:
        """Fetch as `fetch` does, one node after the other."""
        wanted, rest = split(payload, is_remote)
        nodes = _by_node(wanted)
        answers = [self._pull(node, [wanted[number] for number in numbers]) for node, numbers in nodes.items()]
        return with_pulled(rest, _in_order(len(wanted), nodes, answers))

    def close(self) -> None:
        """Close kept connections. Nothing is fetched any more; what is, would connect anew."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
        with self._lock:
            for connections in self._kept.values():
                for connection in connections:
                    connection.close()
                connections.clear()

    def _pull(self, node: str, wanted: list[Wanted]) -> list[pa.RecordBatch]:
        if node not in self._addresses:
            raise RowsUnreachable(f"rows lie on node {node!r}, of which this process was not told.")
        request = Codec().encode(wanted)[0]
        connection = self._kept_one(node)
        if connection is not None:
            try:
                return self._asked(node, connection, request, wanted)
            except ConnectionError:  # it has ended while nobody used it, perhaps
                pass
            except OSError as error:
                raise self._unreachable(node, error) from None
        try:
            connection = connect(self._addresses[node], ROWS, self._token, CONNECT_S)
            return self._asked(node, connection, request, wanted)
        except OSError as error:
            raise self._unreachable(node, error) from None

    def _asked(
        self, node: str, connection: Connection, request: bytes, wanted: Sequence[Wanted]
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
            kept = self._kept[node]
            if len(kept) < KEPT:
                kept.append(connection)
                return batches
        connection.close()
        return batches

    def _kept_one(self, node: str) -> Connection | None:
        with self._lock:
            kept = self._kept[node]
            return kept.pop() if kept else None

    def _unreachable(self, node: str, error: OSError) -> RowsUnreachable:
        return RowsUnreachable(
            f"rows on node {node} at {self._addresses[node]} cannot be read: {type(error).__name__}: {error}. See "
            "whether the machine and the network are well, and that a firewall lets this machine through: "
            "cluster.ports=[20000,20099] keeps to a range of ports."
        )


def _by_node(wanted: Sequence[Wanted]) -> dict[str, list[int]]:
    """Numbers of the wanted batches, by node."""
    nodes: dict[str, list[int]] = {}
    for number, one in enumerate(wanted):
        nodes.setdefault(one.placed.node, []).append(number)
    return nodes


def _in_order(
    count: int, nodes: Mapping[str, list[int]], answers: Sequence[Sequence[pa.RecordBatch]]
) -> list[pa.RecordBatch]:
    found: dict[int, pa.RecordBatch] = {}
    for numbers, batches in zip(nodes.values(), answers, strict=True):
        found.update(zip(numbers, batches, strict=True))
    return [found[number] for number in range(count)]


def split(payload: Payload, is_remote: Callable[[Placed], bool]) -> tuple[list[Wanted], Payload]:
    """Return what is to be pulled, and the payload without its remote sources: what is pulled follows its own, in this
    order. A value that several rows share is pulled once."""
    local: list[SentBatch] = []
    number_of: dict[int, int] = {}
    """New number of each local source."""
    for number, source in enumerate(payload.sources):
        if isinstance(source, Inline) or not is_remote(source):
            number_of[number] = len(local)
            local.append(source)
    wanted: list[tuple[Any, list[str], list[tuple[int, int, int]]]] = []
    columns = []
    for names, places in payload.columns:
        here: list[Place] = []
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
            _add(here, (len(local) + number, taken, min(stride, 1), count))
        columns.append((names, np.asarray(here, dtype=np.int64).reshape(-1, 4)))
    asked = [Wanted(placed, names, np.asarray(spots, dtype=np.int64)) for placed, names, spots in wanted]
    return asked, Payload(payload.row_ids, payload.group_ids, local, columns)


def with_pulled(payload: Payload, pulled: Sequence[pa.RecordBatch]) -> Payload:
    sources: list[SentBatch] = [*payload.sources, *map(Inline, pulled)]
    return Payload(payload.row_ids, payload.group_ids, sources, payload.columns)


def _add(places: list[Place], place: Place) -> None:
    """Add a place, joined with the last one that it follows in the same batch: it is read without a copy then."""
    if places and place[2]:
        source, start, stride, count = places[-1]
        if stride and source == place[0] and start + count == place[1]:
            places[-1] = source, start, stride, count + place[3]
            return
    places.append(place)
