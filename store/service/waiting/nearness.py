"""The node that the next rows of a stage lie on, so that of two consumers that are as good the one there gets them.

    free units, oldest first ─ the first one's largest column ─▶ node ─ Sharing.priority ─▶ which consumer is next

No consumer waits for that and no row overtakes another: units go in their order and evenly, as ever.
"""

import heapq
from typing import Protocol

from penstock.store.data.blocks import Block, Blocks, Place
from penstock.store.data.segments import Segments
from penstock.store.ledger.group import bits
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.readiness import Stage

LOOK = 4
"""Number of groups looked at, at the head of a stage's queue; the first ones may have gone, until a client leases."""


class Nearness(Protocol):
    def of_next(self, stage: Stage) -> str | None:
        """The node of what is next; None if that cannot be told, or nothing is gained by it."""

    def of_client(self, client: str) -> str: ...


class Nowhere:
    """The nearness in a run on one node."""

    def of_next(self, stage: Stage) -> str | None:
        return None

    def of_client(self, client: str) -> str:
        return ""


class OnNodes:
    """The nearness in a run on several nodes."""

    def __init__(self, ledger: Ledger, blocks: Blocks, segments: Segments) -> None:
        self._ledger, self._blocks, self._segments = ledger, blocks, segments

    def of_next(self, stage: Stage) -> str | None:
        oldest = heapq.nsmallest(LOOK, stage.queue)
        groups = (group for group in map(self._ledger.residents.groups.get, oldest) if group is not None)
        group = next((group for group in groups if group.free[stage.index]), None)
        if group is None:
            return None
        index = next(iter(bits(group.free[stage.index])))
        blocks = [self._block(group.id, index, name) for name in stage.spec.reads]
        largest = max(blocks, key=lambda block: block.nbytes, default=None)
        return largest.ref.node if largest is not None and largest.ref is not None else None

    def of_client(self, client: str) -> str:
        return self._segments.node_of(client)

    def _block(self, group: int, index: int, name: str) -> Block:
        found = self._blocks.found(group, range(index, index + 1), name)
        return found.block if isinstance(found, Place) else found[0].block
