"""Measurements of the store itself in `Meters`: waits as they end, all else once a second.

What is counted comes from the ledger's own counters, so that nothing is counted twice, and none of its decisions knows
that it is measured.
"""

import asyncio
import time
from collections import Counter

from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.report import rows_by_state

LOOK_S = 1.0
DROPPED, STALENESS = "dropped/", "staleness/"


class StoreMeter:
    """A meter of one store. Lifecycle: `start` in the store's event loop, `waited` at any time, `close`."""

    def __init__(self, ledger: Ledger, meters: Meters) -> None:
        self._ledger, self._meters = ledger, meters
        self._before = Counter(ledger.counters)
        """The counts so far. For a store that goes on from a snapshot: what was counted before it."""
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to look once a second. A second start changes nothing."""
        if self._looking is None:
            for reason in table.DROP_REASONS:
                self._meters.add(table.STORE_DROPPED, 0, reason=reason)
            self._looking = asyncio.get_running_loop().create_task(self._look_again_and_again())

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def waited(self, stage: str, seconds: float) -> None:
        """Note that a client has got a lease, so long after asking for it."""
        self._meters.observe(table.STORE_LEASE_WAIT, seconds, stage=stage)

    def look(self) -> None:
        """Note what there is now, and what was counted since the last time."""
        residents, spec = self._ledger.residents, self._ledger.spec
        self._meters.put(table.STORE_SEEN, time.time())
        self._meters.put(table.STORE_BYTES, residents.credits.bytes)
        self._meters.put(table.STORE_CAPACITY, spec.max_bytes)
        self._meters.put(table.STORE_LEASES, len(residents.leases.held))
        self._note_counters()
        for stage, counts in rows_by_state(self._ledger).items():
            for state, count in counts.items():
                self._meters.put(table.STORE_ROWS, count, stage=stage, state=state)

    def _note_counters(self) -> None:
        grown, self._before = self._ledger.counters - self._before, Counter(self._ledger.counters)
        self._meters.add(table.STORE_ADMITTED, grown["groups_admitted"] * self._ledger.spec.group_size)
        for name, count in grown.items():
            if name.startswith(DROPPED):
                self._meters.add(table.STORE_DROPPED, count, reason=name.removeprefix(DROPPED))
            elif name.startswith(STALENESS):
                self._meters.observe(table.STORE_STALENESS, float(name.removeprefix(STALENESS)), times=count)

    async def _look_again_and_again(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)
