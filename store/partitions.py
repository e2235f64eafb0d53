"""A store in several parts, each an actor with a ledger of its own: N event loops share the control load.

Groups go round-robin: part p of N has the groups `local * N + p`, forms its batches of `groups_per_step / N` of them,
and keeps the staleness contract by itself, on the same versions. A step's batch is the union of the parts' batches, so
the contract holds for all of it, exactly; `split_spec` has the arithmetic. A worker asks the part that its name falls
on, and all of them when that one has nothing.

`Partitioned` stands where a link to one store would: the client does not know. Ids are numbered so that they tell the
part: `global = local * N + p`, for groups, and for leases.
"""

import asyncio
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.store.arena import Slot
from penstock.store.calls import Ask, Granted, Result, Write
from penstock.store.errors import StoreError
from penstock.store.group import Facts
from penstock.store.layout import Placed
from penstock.store.spec import StoreSpec
from penstock.store.transport import Link

MAX_ROUNDS = 64
"""Shared leases that are remembered, for late acknowledgements."""
LARGEST = ("staleness/worst", "store/updates_formed", "store/length_bias")
"""Numbers of `stats` of which the largest counts; the means of waiting times are averaged, all others added up."""


def split_spec(spec: StoreSpec, num_parts: int) -> StoreSpec:
    """What each part is made with. Raises `StoreError` unless `num_parts` divides `groups_per_step`.

    With P' = P / N and w' = 1 + (w - 1) // N: `ceil((w' - 1) / P') <= ceil((w - 1) / P)`, so each part stays within
    `max_staleness` by the proof of `admission.py`.
    """
    if num_parts < 1 or spec.groups_per_step % num_parts:
        raise StoreError(
            f"store.num_partitions={num_parts} must divide trainer.groups_per_step={spec.groups_per_step}: each part "
            "contributes the same number of groups to every step."
        )
    return replace(
        spec,
        groups_per_step=spec.groups_per_step // num_parts,
        max_active_groups=spec.max_active_groups // num_parts,
        window=1 + (spec.window - 1) // num_parts,
        max_bytes=spec.max_bytes // num_parts,
    )


def snapshot_places(root: str, num_parts: int) -> list[str]:
    """Where each part's snapshots are, below the root that `StoreClient.snapshot` was given."""
    return [root] if num_parts == 1 else [f"{root}/part-{index}" for index in range(num_parts)]


class Partitioned:
    """A link to all parts. One for each client, like any link."""

    def __init__(self, parts: Sequence[Link]) -> None:
        self._parts = list(parts)
        self._numbers: Iterator[int] | None = None
        """Of the groups that come next; from the first `put` on."""
        self._group_size: int | None = None
        self._inline_bytes = 0
        self._rounds: dict[int, tuple[int, list[int]]] = {}
        """Shared lease -> number of ranks, and lease of each part. Their ids are negative."""
        self._round_ids = itertools.count(-2, -1)

    async def call(self, method: str, *args: Any) -> Any:
        special = getattr(self, f"_{method}", None)
        if special is not None:
            return await special(*args)
        return (await self._all(method, *args))[0]

    async def reserve(self, nbytes: int) -> Slot | None:
        """Not yet: each part has its own place."""
        return None

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Any:
        self._inline_bytes = inline_bytes
        return batch

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        """`refs`: (part, what that one calls it)."""
        return [(await self._parts[part].fetch([ref]))[0] for part, ref in refs]

    # What goes to one part.

    async def _put(self, names: list[str], batch: pa.RecordBatch, facts: Facts, priority: int) -> list[int]:
        """Each part gets every N-th group, going on where the last call ended, or what the parts were restored from."""
        count, num_parts = len(facts.row_bytes), len(self._parts)
        if self._numbers is None:
            self._numbers = missing_numbers(await self._all("admitted"))
        turns = [number % num_parts for number in itertools.islice(self._numbers, count)]
        numbers = [0] * count
        puts, places = [], []
        for part in range(num_parts):
            chosen = [position for position, turn in enumerate(turns) if turn == part]
            if chosen:
                places.append((part, chosen))
                some = batch.take(pa.array(chosen)) if len(chosen) < count else batch
                parcel = await self._parts[part].ship(some, self._inline_bytes)
                puts.append(self._parts[part].call("put", names, parcel, _pick(facts, chosen), priority))
        for (part, chosen), admitted in zip(places, await asyncio.gather(*puts), strict=True):
            for position, number in zip(chosen, admitted, strict=True):
                numbers[position] = number * num_parts + part
        return numbers

    async def _lease(self, ask: Ask) -> list[Granted] | None:
        await self._size()
        home = zlib.crc32(f"{ask.owner}/{ask.client}".encode()) % len(self._parts)
        granted = await self._parts[home].call("lease", replace(ask, wait=False))
        if granted or not ask.wait:
            return self._global(granted, home)
        return await self._first(ask)

    async def _first(self, ask: Ask) -> list[Granted] | None:
        """Wait at all parts; what the others grant as well goes back."""
        waits = {asyncio.ensure_future(part.call("lease", ask)): index for index, part in enumerate(self._parts)}
        pending, won, found = set(waits), -1, None
        while pending and not found:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                granted = wait.result()
                if granted and not found:
                    won, found = waits[wait], granted
                elif granted:
                    await self._give_back(waits[wait], granted)
        await asyncio.gather(*(self._retract(wait, waits[wait], ask) for wait in pending))
        return self._global(found, won) if found else None

    async def _retract(self, wait: "asyncio.Future[list[Granted] | None]", part: int, ask: Ask) -> None:
        await self._parts[part].call("withdraw", ask.stage, ask.client, ask.ticket)
        await self._give_back(part, await wait or [])

    async def _give_back(self, part: int, granted: list[Granted]) -> None:
        for one in granted:
            await self._parts[part].fetch(one.payload.refs)  # read and let go, so that the part knows
            await self._parts[part].call("release", one.lease_id)

    # What goes to all parts, or to those that a lease is of.

    async def _lease_shared(
        self, stage: str, number: int, rank: int, num_ranks: int, max_units: int, owner: str, max_rounds: int
    ) -> list[Granted] | None:
        """This rank's share in each part, one round at a time. Rank numbers are rotated from part to part, which evens
        out who gets the heavier halves."""
        await self._size()
        shares = await asyncio.gather(
            *(
                part.call("lease_shared", stage, number, (rank + index) % num_ranks, num_ranks, max_units, owner, 1)
                for index, part in enumerate(self._parts)
            )
        )
        if any(share is None for share in shares):
            return None
        lease_id = next(self._round_ids)
        self._rounds[lease_id] = num_ranks, [share[0].lease_id for share in shares]
        if len(self._rounds) > MAX_ROUNDS:
            del self._rounds[next(iter(self._rounds))]
        parts = [self._renumbered(share[0], index) for index, share in enumerate(shares)]
        return [replace(parts[0], lease_id=lease_id, siblings=tuple(parts[1:]))]

    async def _complete_shared(self, lease_id: int, rank: int) -> None:
        num_ranks, leases = self._round(lease_id)
        await asyncio.gather(
            *(
                part.call("complete_shared", local, (rank + index) % num_ranks)
                for index, (part, local) in enumerate(zip(self._parts, leases, strict=True))
            )
        )

    async def _release(self, lease_id: int) -> None:
        await asyncio.gather(*(self._parts[part].call("release", local) for part, local in self._where(lease_id)))

    async def _renew(self, lease_ids: list[int]) -> list[int]:
        by_part: dict[int, dict[int, int]] = {}
        for lease_id in lease_ids:
            for part, local in self._where(lease_id):
                by_part.setdefault(part, {})[local] = lease_id
        over = await asyncio.gather(*(self._parts[part].call("renew", list(ids)) for part, ids in by_part.items()))
        lost = Counter(ids[local] for ids, gone in zip(by_part.values(), over, strict=True) for local in gone)
        return [lease_id for lease_id, count in lost.items() if count == len(self._where(lease_id))]

    async def _write(self, one: Write) -> None:
        size, num_parts = await self._size(), len(self._parts)
        group_ids = np.asarray(one.row_ids, dtype=np.int64) // size
        writes: list[Any] = []
        for part, local in self._where(one.lease_id):
            chosen = np.flatnonzero(group_ids % num_parts == part).tolist()
            if chosen:
                rows = [_local_row(one.row_ids[position], size, num_parts) for position in chosen]
                assert not isinstance(one.parcel, Placed)
                batch = one.parcel.take(pa.array(chosen)) if len(chosen) < len(one.row_ids) else one.parcel
                parcel = await self._parts[part].ship(batch, self._inline_bytes)
                write = Write(local, one.stage, rows, one.names, parcel, _pick(one.facts, chosen))
                writes.append(self._parts[part].call("write", write))
        await asyncio.gather(*writes)

    async def _drop(self, lease_id: int, stage: str, row_ids: list[int], reason: str, detail: str) -> None:
        size, num_parts = await self._size(), len(self._parts)
        for part, local in self._where(lease_id):
            rows = [_local_row(row, size, num_parts) for row in row_ids if row // size % num_parts == part]
            if rows:
                await self._parts[part].call("drop", local, stage, rows, reason, detail)

    async def _many(self, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Result]:
        async def one(method: str, arguments: tuple[Any, ...]) -> Result:
            try:
                return await self.call(method, *arguments), None
            except StoreError as error:
                return None, error

        return list(await asyncio.gather(*(one(method, arguments) for method, arguments in calls)))

    async def _last_batch(self, names: list[str] | None) -> Granted:
        await self._size()
        parts = [self._renumbered(part, index) for index, part in enumerate(await self._all("last_batch", names))]
        return replace(parts[0], siblings=tuple(parts[1:]))

    async def _abandon(self, owner: str) -> int:
        return sum(await self._all("abandon", owner))

    async def _errors(self) -> list[str]:
        return list(itertools.chain.from_iterable(await self._all("errors")))

    async def _snapshot(self, root: str, number: int, keep: int) -> str:
        """Each part below `root/part-p`. A consistent cut if nothing moves meanwhile: take it at a step boundary."""
        places = snapshot_places(root, len(self._parts))
        parts = zip(self._parts, places, strict=True)
        await asyncio.gather(*(part.call("snapshot", place, number, keep) for part, place in parts))
        return root

    async def _cut(self) -> list[int]:
        return await self._all("cut")

    async def _admitted(self) -> list[int]:
        return await self._all("admitted")

    async def _stats(self) -> dict[str, float]:
        parts = await self._all("stats")
        together: dict[str, float] = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            values = [part[name] for part in parts if name in part]
            if name in LARGEST:
                together[name] = max(values)
            elif "/wait_s/" in name:
                together[name] = sum(values) / len(values)
            else:
                together[name] = sum(values)
        return together

    async def _describe(self) -> dict[str, Any]:
        """As one store's, with the parts' own below `parts`."""
        parts = await self._all("describe")
        rows: dict[str, Counter[str]] = {}
        for part in parts:
            for stage, counts in part["rows"].items():
                rows.setdefault(stage, Counter()).update(counts)
        waiting = [
            (part["oldest_group"] * len(parts) + index, part["oldest_group_waits_for"])
            for index, part in enumerate(parts)
            if part["oldest_group"] is not None
        ]
        oldest, lacking = min(waiting, key=lambda one: one[0], default=(None, {}))
        return {
            **parts[0],
            "oldest_group": oldest,
            "oldest_group_waits_for": lacking,
            "rows": {stage: dict(counts) for stage, counts in rows.items()},
            "leases": [lease for part in parts for lease in part["leases"]],
            "wait_s": {stage: sum(part["wait_s"][stage] for part in parts) / len(parts) for stage in rows},
            "counters": dict(sum((Counter(part["counters"]) for part in parts), Counter[str]())),
            "waiters": {stage: [name for part in parts for name in part["waiters"][stage]] for stage in rows},
            "waiting": dict(sum((Counter(part["waiting"]) for part in parts), Counter[str]())),
            "credits": {
                "active": sum(part["credits"]["active"] for part in parts),
                "max": sum(part["credits"]["max"] for part in parts),
                "published": min(part["credits"]["published"] for part in parts),
            },
            "blocks": dict(sum((Counter(part["blocks"]) for part in parts), Counter[str]())),
            "parts": parts,
        }

    # Numbers of a part and of the whole.

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(part.call(method, *args) for part in self._parts)))

    async def _size(self) -> int:
        if self._group_size is None:
            self._group_size = (await self._parts[0].call("spec")).group_size
        return self._group_size

    def _round(self, lease_id: int) -> tuple[int, list[int]]:
        if lease_id not in self._rounds:
            raise StoreError(f"lease {lease_id} is no round that this client has asked for lately.")
        return self._rounds[lease_id]

    def _where(self, lease_id: int) -> list[tuple[int, int]]:
        """(part, lease there): one, or all parts for a shared lease."""
        if lease_id >= 0:
            return [(lease_id % len(self._parts), lease_id // len(self._parts))]
        return list(enumerate(self._round(lease_id)[1]))

    def _global(self, granted: list[Granted] | None, part: int) -> list[Granted] | None:
        if granted is None:
            return None
        number = len(self._parts)
        return [replace(self._renumbered(one, part), lease_id=one.lease_id * number + part) for one in granted]

    def _renumbered(self, granted: Granted, part: int) -> Granted:
        """The same rows, by their numbers in the whole."""
        assert self._group_size is not None
        size, payload = self._group_size, granted.payload
        group_ids = payload.group_ids * len(self._parts) + part
        row_ids = group_ids * size + payload.row_ids % size
        refs = [(part, ref) for ref in payload.refs]
        return replace(granted, payload=replace(payload, row_ids=row_ids, group_ids=group_ids, refs=refs))


def missing_numbers(admitted: Sequence[int]) -> Iterator[int]:
    """Numbers of the groups that have not been put yet, in order, where part p has had its first `admitted[p]`."""
    num_parts = len(admitted)
    return (number for number in itertools.count() if number // num_parts >= admitted[number % num_parts])


def _local_row(row: int, size: int, num_parts: int) -> int:
    return row // size // num_parts * size + row % size


def _pick(facts: Facts, positions: list[int]) -> Facts:
    """The facts of some rows."""

    def some(values: list[int] | None) -> list[int] | None:
        return None if values is None else [values[position] for position in positions]

    return Facts(
        [facts.row_bytes[position] for position in positions],
        some(facts.oldest_version),
        some(facts.response_tokens),
        some(facts.prompt_tokens),
        facts.token_column,
        some(facts.token_lengths),
    )
