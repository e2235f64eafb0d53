"""Nodes on which large batches may lie: those of a run, each with its own directories and a server of what lies there.

    writer ─ file ─▶ its node's directory     ─ `Placed`, facts ─▶ store     the store never sees the bytes
    reader ◀─ spans, columns ─ TCP ─ its node's rows server ◀─ orders ─ store: what becomes of a file

The creator of the store tells it, and the store tells its clients (`service/server.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.network.connection import Address

ROWS = 2
"""The number of the service of a rows server (`network/listener.py`)."""


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
