"""Where large batches may lie: the nodes of a run, each with directories of its own and a server of what lies there.

    writer ─ file ─▶ its node's directory     ─ `Placed`, facts ─▶ store     the store never sees the bytes
    reader ◀─ spans, columns ─ TCP ─ its node's rows server ◀─ orders ─ store: what becomes of a file

Told to the store by who makes it, and to clients by the store (`service/server.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.network.connection import Address

ROWS = 2
"""What a connection to a rows server asks for (`network/listener.py`)."""


@dataclass(frozen=True)
class RowsNode:
    """One node, or several that share their memory."""

    id: str
    """What segments say that lie here."""
    places: tuple[str, str]
    """Directories of segments: shared memory, disk."""
    address: Address
    """Of its rows server."""


@dataclass(frozen=True)
class RowsNodes:
    """All nodes of a run, by Ray's id. `token`: what their servers ask for."""

    by_id: Mapping[str, RowsNode] = field(default_factory=dict)
    token: bytes = field(default=b"", repr=False)

    @property
    def addresses(self) -> dict[str, Address]:
        """By what segments say."""
        return {node.id: node.address for node in self.by_id.values()}

    def without(self, node: str) -> "RowsNodes":
        """The same after a node was lost. Clients there, if it comes back, are as those of nodes that come later: what
        they write goes to the store."""
        return RowsNodes({other: its for other, its in self.by_id.items() if its.id != node}, self.token)

    def shares_memory(self, one: str, other: str) -> bool:
        """Whether two of Ray's nodes see the same files."""
        if one == other:
            return True
        return one in self.by_id and other in self.by_id and self.by_id[one].id == self.by_id[other].id
