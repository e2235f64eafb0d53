"""Reports of the store on itself: numbers for the metrics of a step, a table for people, measurements for `Meters`.

All are read from the ledger and its own counters: nothing is counted twice, nothing changes, and no decision knows that
it is measured.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.store.data.segments import Segments
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import STORE_LOST, Ledger
from penstock.store.service.store_server import StoreServer

Described = dict[str, Any]
LEASES_AT_ONCE = 256
POLL_S = 1.0
DROPPED, STALENESS = "dropped/", "staleness/"


def stats(ledger: Ledger) -> dict[str, float]:
    """Flat numbers: store/*, staleness/*, and of rows, cumulative: dropped/<reason>, completed/<stage>, and
    lost/<stage> for those whose result is gone with a node. What is made again is completed, and its tokens generated,
    again.
    """
    residents, counters = ledger.residents, ledger.counters
    numbers: dict[str, float] = {
        "store/rows": residents.num_rows,
        "store/groups": len(residents.groups),
        "store/active_groups": residents.credits.active,
        "store/bytes": residents.credits.bytes,
        "store/leases": len(residents.leases.held),
        "staleness/worst": ledger.rounds.staleness_max,
    }
    for stage in residents.readiness.stages:
        numbers[f"store/ready/{stage.name}"] = stage.num_free
        numbers[f"store/wait_s/{stage.name}"] = stage.mean_wait_s
    numbers.update({name if "/" in name else f"store/{name}": count for name, count in counters.items()})
    if residents.past:  # they are admitted again only to end
        trained = sum(mask.bit_count() for mask, _ in residents.past.values())
        lost = len(residents.past) * residents.size - trained
        of_past = {"store/groups_admitted": len(residents.past), "store/rows_trained": trained}
        for name, count in {**of_past, f"dropped/{STORE_LOST}": lost}.items():
            numbers[name] = numbers.get(name, 0) + count
    generated, trained = counters["response_tokens_generated"], counters["response_tokens_trained"]
    rows_generated = max(1, counters["groups_admitted"] * residents.size)
    if generated and trained and counters["rows_trained"]:
        written = max(1, _rows_with_response(ledger, rows_generated))
        numbers["store/length_bias"] = (trained / counters["rows_trained"]) / (generated / written)
    return numbers


def of_segments(segments: Segments) -> dict[str, float]:
    """Numbers of large batches."""
    return {
        "store/shared_bytes": segments.book.bytes,
        "store/spilled_bytes": segments.book.spilled_bytes,
        "store/large_by_value": segments.kept,
        "store/sent_bytes": segments.rows.sent_bytes,
    }


def of_server(server: StoreServer) -> dict[str, float]:
    """Numbers of connections that ended at once."""
    return {"store/refused_connections": server.refused, "store/malformed_messages": server.malformed}


def _rows_with_response(ledger: Ledger, admitted: int) -> int:
    """Rows that ever had a response: those that the stage writing it completed, or all if the source brought it."""
    writer = next((stage.name for stage in ledger.spec.stages if "response_ids" in stage.writes), None)
    return ledger.counters[f"completed/{writer}"] if writer else admitted


async def describe(ledger: Ledger, now: float, since: Callable[[int], float | None] = lambda lease: None) -> Described:
    """Return rows by stage and state, the oldest group, and each lease with its owner, start and deadline. `since`:
    when a lease was granted, in seconds since the epoch. Leases are many: other calls are served in between, and one
    may end meanwhile."""
    residents = ledger.residents
    oldest = residents.first_waiting()
    leases = []
    for number, lease in enumerate(list(residents.leases.held.values()), 1):
        leases.append(_of_lease(ledger, lease, now, since))
        if number % LEASES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return {
        "rows": rows_by_state(ledger),
        "wait_s": {stage.name: stage.mean_wait_s for stage in residents.readiness.stages},
        "counters": dict(ledger.counters),
        "oldest_group": oldest,
        "oldest_group_waits_for": _lacking(ledger, oldest) if oldest is not None else {},
        "leases": leases,
        "credits": {
            "active": residents.credits.active,
            "max": residents.credits.max_active,
            "served": residents.credits.served_version,
        },
    }


def _of_lease(ledger: Ledger, lease: HeldLease, now: float, since: Callable[[int], float | None]) -> Described:
    return {
        "id": lease.id,
        "stage": ledger.residents.readiness.stages[lease.stage].name,
        "owner": lease.owner,
        "open_rows": sum(mask.bit_count() for mask in lease.open.values()),
        "held_s": None if (begun := since(lease.id)) is None else round(time.time() - begun, 3),
        "expires_in_s": None if lease.deadline is None else round(lease.deadline - now, 3),
    }


def rows_by_state(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Number of live rows that wait for columns, are free, leased, done, by stage."""
    rows = {}
    for stage in ledger.residents.readiness.stages:
        counts = {"free": stage.free_rows, "leased": stage.leased_rows, "done": stage.done_rows}
        rows[stage.name] = {"waiting": ledger.residents.num_rows - sum(counts.values()), **counts}
    return rows


def _lacking(ledger: Ledger, group_id: int) -> dict[str, int]:
    """Columns that live rows of a group lack, and how many rows lack them."""
    group = ledger.residents.groups[group_id]
    lacking = {
        name: (group.live & ~group.have[index]).bit_count()
        for name, index in ledger.residents.readiness.column_index.items()
    }
    return {name: count for name, count in lacking.items() if count}


class StoreMeter:
    """A meter of one store: waits as they end, all else once a second. Lifecycle: `start` in the store's event
    loop, `waited` at any time, `close`."""

    def __init__(self, ledger: Ledger, meters: Meters) -> None:
        self._ledger, self._meters = ledger, meters
        self._before = Counter(ledger.counters)
        """The counts so far; of a restored store, those of its snapshot."""
        self._poll_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to look once a second. A second start changes nothing."""
        if self._poll_task is None:
            self._poll_task = asyncio.get_running_loop().create_task(self._poll())

    def close(self) -> None:
        if self._poll_task is not None:
            self._poll_task.cancel()

    def waited(self, stage: str, seconds: float) -> None:
        """Note that a client has got a lease, so long after asking for it."""
        self._meters.add(table.STORE_LEASE_WAIT, seconds, stage=stage)

    def look(self) -> None:
        """Note what there is now, and what was counted since the last time."""
        residents, spec = self._ledger.residents, self._ledger.spec
        self._meters.put(table.STORE_SEEN, time.time())
        self._meters.put(table.STORE_BYTES, residents.credits.bytes)
        self._meters.put(table.STORE_CAPACITY, spec.max_bytes)
        self._meters.put(table.STORE_LEASES, len(residents.leases.held))
        self._note_counters()
        for stage, counts in rows_by_state(self._ledger).items():
            for state in ("free", "leased"):
                self._meters.put(table.STORE_ROWS, counts[state], stage=stage, state=state)

    def _note_counters(self) -> None:
        grown, self._before = self._ledger.counters - self._before, Counter(self._ledger.counters)
        self._meters.add(table.STORE_ADMITTED, grown["groups_admitted"] * self._ledger.spec.group_size)
        for name, count in grown.items():
            if name.startswith(DROPPED):
                self._meters.add(table.STORE_DROPPED, count, reason=name.removeprefix(DROPPED))
            elif name.startswith(STALENESS):
                self._meters.observe(table.STORE_STALENESS, float(name.removeprefix(STALENESS)), times=count)

    async def _poll(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(POLL_S)
