"""Brings the store back when its process is lost, beside members that stay: another goes on from its last snapshot, and
is told what was trained since.

    snapshots, by themselves      every faults.store_snapshot_s
    store lost ─▶ another from the snapshot ─▶ catch_up(rows trained since, by step) ─▶ members serve it

Which rows each step has trained is known from the ranks' reports. What was not trained comes again, with its number and
its seed (`store/ledger/catching_up.py`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.fleet.store_process import StoreProcess
from penstock.orchestrator.cluster.ray_calls import answer
from penstock.store.client.client import StoreClient
from penstock.store.service.actor import STORE
from penstock.workers.trainer.report import StepReport

STAGE = "train"


class StoreRecovery:
    """Lifecycle: told of each step `trained` and each version `published`; `take_snapshots` until it is cancelled;
    `bring_back` when the store is gone."""

    def __init__(self, fleet: Fleet, store: StoreClient, before: int, every_s: float, timeout_s: float) -> None:
        """`before`: the last step before this process. `every_s`: seconds between snapshots; 0: none is taken, and the
        store goes back to what the run began with. `timeout_s`: deadline for a snapshot to be written, and to be
        read."""
        self.generation = 0
        """Number of stores before this one."""
        self._fleet, self._store = fleet, store
        self._every_s, self._timeout_s = every_s, timeout_s
        self._rows: dict[int, np.ndarray] = {}
        """Row ids of the steps since the snapshot, by step."""
        self._last = self._told = self._version = before
        """The step trained last, the last that the store knows, and the version published last."""
        self._snapshot = fleet.resumed.store if fleet.resumed is not None else None
        self._lock, self._replacing = asyncio.Lock(), asyncio.Lock()
        """Locks of the snapshots, and of another store that takes the place of a lost one."""

    async def trained(self, step: int, reports: Sequence[StepReport], generation: int) -> None:
        """Tell the store that this step was trained: its rows end. `generation`: that of the store that its batch came
        from. A store that has taken its place meanwhile, or takes it now, hears of it by `tell`, as does one that takes
        its place because this raises."""
        self._rows[step] = np.concatenate([report.row_ids for report in reports])
        self._last = step
        if generation != self.generation or self._replacing.locked():
            async with self._replacing:
                await self.tell()
            return
        told = [self._store.complete_shared(report.share) for report in reports if report.share is not None]
        await self._in_time(asyncio.gather(*told))
        self._told = step

    async def adopt(self) -> None:
        """Take a first snapshot of a store that was there before this process, to bring it back from. Raises what the
        store fails with."""
        async with self._lock:
            await self._take(0)

    def published(self, version: int) -> None:
        self._version = version

    async def take_snapshots(self) -> None:
        """Take snapshots. One that fails is left out: the one before stays, and callers of the store hear that it is
        gone. The first is taken at once where the run goes on from a checkpoint, which may be gone after the next."""
        number, pause_s = 1, 0.0 if self._snapshot is not None else self._every_s
        while self._every_s:
            await asyncio.sleep(pause_s)
            pause_s = self._every_s
            with contextlib.suppress(PenstockError):
                async with self._lock:
                    await self._take(number)
                number += 1  # only now: one that is not heard of must not push out the one before

    async def bring_back(self) -> None:
        """Start another store, and attach the ranks to it. Raises what starting it raised."""
        async with self._lock, self._replacing:
            await self._process.replace(self._snapshot, self._timeout_s)
            await self._store.move(self._fleet.store)
            self._told = int(await self._in_time(self._store.settle(STAGE)))
            await self.tell()
            await self._fleet.attach_trainers()
            self.generation += 1

    async def tell(self) -> None:
        """Tell the store of all steps that were trained and that it does not know."""
        last = self._last
        steps = [self._rows[step].tolist() for step in range(self._told + 1, last + 1)]
        await self._in_time(self._store.catch_up(steps, self._version))
        self._told = last

    @property
    def _process(self) -> StoreProcess:
        assert self._fleet.store_process is not None  # who trains has one
        return self._fleet.store_process

    async def _take(self, number: int) -> None:
        last, place = self._last, await self._process.scratch(self._timeout_s)
        self._snapshot = await self._in_time(self._store.snapshot(place, number, is_apart=True))
        self._rows = {step: rows for step, rows in self._rows.items() if step > last}

    async def _in_time(self, call: Awaitable[Any]) -> Any:
        return await answer(call, name=STORE, phase="bring the store back", timeout_s=self._timeout_s)
