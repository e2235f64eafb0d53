"""Nodes on which large batches may lie, those of a run, each with its own directories and a server of what lies there;
and the orders to them about their files.

    writer ─ file ─▶ its node's directory     ─ `Placed`, facts ─▶ store     the store never sees the bytes
    reader ◀─ spans, columns ─ TCP ─ its node's rows server ◀─ orders ─ store: what becomes of a file

The creator of the store tells it which nodes there are, and the store tells its clients (`service/server.py`).
"""

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.network.connection import Address, Connection, connect
from penstock.store.data.codec import Codec
from penstock.store.data.remote.server import DONE, ORDERS, Order

ROWS = 2
"""The number of the service of a rows server (`network/listener.py`)."""
CONNECT_S = 10.0
PATIENCE_S = 60.0
"""Seconds for which a node is tried. One that cannot be reached for so long is gone, and its shared memory with it: it
is told nothing more."""
PAUSE_S = 1.0
MANY = 1000
"""The most orders in one message."""


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
        """Return the nodes that are left after one was lost. If it comes back, its clients are as those of nodes that
        come later: what they write goes to the store."""
        return RowsNodes({other: its for other, its in self.by_id.items() if its.id != node}, self.token)

    def shares_memory(self, one: str, other: str) -> bool:
        """Return whether two of Ray's nodes see the same files."""
        if one == other:
            return True
        return one in self.by_id and other in self.by_id and self.by_id[one].id == self.by_id[other].id


class Orders:
    """The orders to all nodes about files there, told to each node in order, and carried out by its rows server.
    Lifecycle: `give` any number of times, `close`.

    No process waits for it: a file that is removed late costs memory for that long, and nothing else. Each node has its
    own thread, so one that hangs holds up no other.
    """

    def __init__(self, nodes: RowsNodes) -> None:
        self._addresses, self._token = nodes.addresses, nodes.token
        self._to: dict[str, queue.SimpleQueue[Order | None]] = {}
        self._closed = threading.Event()
        self._gone: set[str] = set()
        """Nodes that are told nothing more."""
        self.lost = 0
        """Orders to nodes that were gone."""

    def give(self, node: str, order: Order) -> None:
        """Give an order. It is carried out after those that this node was given before."""
        waiting = self._to.get(node)
        if waiting is None:
            waiting = self._to[node] = queue.SimpleQueue()
            arguments = node, waiting
            threading.Thread(target=self._tell_all, args=arguments, name="orders", daemon=True).start()
        waiting.put(order)

    def node_lost(self, node: str) -> None:
        """Count a node as gone from now on, whether it can be reached or not."""
        self._gone.add(node)

    def close(self) -> None:
        """Tell nothing any more: the nodes remove what they have at the end of the run."""
        self._closed.set()
        for waiting in self._to.values():
            waiting.put(None)

    def _tell_all(self, node: str, waiting: "queue.SimpleQueue[Order | None]") -> None:
        connection: Connection | None = None
        while (order := waiting.get()) is not None:
            together = [order]
            while len(together) < MANY and not waiting.empty():
                if (order := waiting.get()) is None:
                    waiting.put(None)
                    break
                together.append(order)
            connection = self._told(node, connection, together)
            if connection is None:
                self._gone.add(node)
                self.lost += len(together)
        if connection is not None:
            connection.close()

    def _told(self, node: str, connection: Connection | None, orders: list[Order]) -> Connection | None:
        """Send orders. Returns the connection that they were told over; None if the node is gone. Orders may be told
        twice."""
        address, body = self._addresses[node], Codec().encode(orders)[0]
        give_up = time.monotonic() + PATIENCE_S
        while not self._closed.is_set() and node not in self._gone:
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
        if connection is not None and node in self._gone:
            connection.close()
            return None
        return connection
