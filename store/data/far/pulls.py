"""Reads from other nodes: several batches of a node in one request, several nodes at the same time, over
connections that are kept.

    pulls = Pulls(addresses, token)
    payload = await pulls.fetch(payload, is_far)     or `fetch_blocking`, in a thread
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from penstock.network.connection import Address, Connection, connect
from penstock.store.data.codec import Codec, Malformed
from penstock.store.data.far.nodes import ROWS
from penstock.store.data.far.server import DONE, FAILED, PULL
from penstock.store.data.far.wanted import Wanted, split, with_pulled
from penstock.store.data.layout import Placed
from penstock.store.data.payload import Payload
from penstock.store.errors import RowsUnreachable, StoreError

CONNECT_S = 10.0
AT_ONCE = 16
"""The most requests of one process that are under way."""
KEPT = 4
"""The most connections to a node that wait for the next request."""


class Pulls:
    """A reader of other nodes. Lifecycle: `fetch` and `fetch_blocking` any number of times, from any thread; `close`.
    `addresses`: of the rows servers, by the node's name in segments."""

    def __init__(self, addresses: Mapping[str, Address], token: bytes) -> None:
        self._addresses, self._token = addresses, token
        self._lock = threading.Lock()
        self._kept: dict[str, list[Connection]] = {node: [] for node in addresses}
        self._threads: ThreadPoolExecutor | None = None

    async def fetch(self, payload: Payload, is_far: Callable[[Placed], bool]) -> Payload:
        """Return the payload with the values of its far sources in their place. Raises `RowsUnreachable`,
        `StoreError`."""
        wanted, rest = split(payload, is_far)
        if self._threads is None:  # of its own: others wait in the event loop's
            self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull")
        loop, nodes = asyncio.get_running_loop(), _by_node(wanted)
        pulling = [
            loop.run_in_executor(self._threads, self._pull, node, [wanted[number] for number in numbers])
            for node, numbers in nodes.items()
        ]
        answers = await asyncio.gather(*pulling)
        return with_pulled(rest, _in_order(len(wanted), nodes, answers))

    def fetch_blocking(self, payload: Payload, is_far: Callable[[Placed], bool]) -> Payload:
        """Fetch as `fetch` does, one node after the other."""
        wanted, rest = split(payload, is_far)
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
