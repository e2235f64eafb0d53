"""Turns on devices that engines and trainers share (`placement=colocated`).

    generation:  ranks have made room, engines are awake and load the newest version ─▶ the store has a batch
    training:    engines sleep, scorers have made room, ranks are back ─▶ update, publication

Who takes the place of a lost one starts when it is its turn: an engine when the ranks have made room, ranks while the
engines sleep. An engine that is lost in its turn is started in it, and one that is lost asleep in the next. Ranks that
are lost while engines generate are missed when they are to come back, and a step that is taken again begins with a
turn of the engines: a new store may lack some of its samples.

Engines keep no weights while they sleep: after `generation` they sample once they have loaded a version. The step that
is taken again has them load the one that they had.

A scorer comes back by itself when it has rows to compute, which is while engines generate.

Rank i and engine i have one GPU: `placement/reservation.py`. With devices of their own, all are there all the time, and
none waits for a turn.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answer, answers, failed, outcomes
from penstock.store.client.client import StoreClient

ENGINES, RANKS, SCORERS = "rollout", "trainer", "scorer"
"""Roles that take turns, and the one that makes room for ranks."""


class DeviceTurns:
    """Lifecycle: `generation` before the first batch is waited for, then `training` and `generation` in turn; `of`
    around the start of who takes a lost one's place."""

    def __init__(
        self, fleet: Fleet, store: StoreClient, config: RunConfig, reload: Callable[[], Awaitable[object]]
    ) -> None:
        """`reload`: has engines load the version again that they have loaded last, if any."""
        self._fleet, self._store, self._config, self._reload = fleet, store, config, reload
        self._takes_turns = config.placement == "colocated" and bool(fleet.role(ENGINES))
        self._turn = ""
        """The role that has the devices; empty at the start, when both have them."""
        self._num_starting = 0
        """Number of engines that start in this turn."""
        self._changed = asyncio.Condition()

    async def training(self, step: int) -> None:
        """Wait for a batch, then give the devices to the ranks. Raises `DeadlineExceeded`, `WorkerDied`."""
        if not self._takes_turns:
            return
        if self._turn != ENGINES:
            await self.generation()
            await self._reload()
        phase, timeout_s = f"step {step}, waiting for its batch", self._config.trainer.step_timeout_s
        await answer(self._store.batch_ready(), name="Store", phase=phase, timeout_s=timeout_s)
        await self._have_engines_sleep()
        calls: list[tuple[str, Any]] = [(name, handle.take_device.remote()) for name, handle in self._fleet.role(RANKS)]
        await answers(calls, phase="trainer: take device", timeout_s=self._config.weights.phase_timeout_s)

    async def generation(self) -> None:
        """Give the devices to the engines, unless they have them. A rank that fails to make room is ended, and missed
        when it is to come back. Raises errors that would come again."""
        if not self._takes_turns or self._turn == ENGINES:
            return
        self._fleet.kill(await self._failing(RANKS, "leave_device"))
        async with self._changed:
            self._turn = ENGINES
            self._changed.notify_all()
        self._fleet.remove(await self._failing(ENGINES, "wake"))

    @contextlib.asynccontextmanager
    async def of(self, role: str) -> AsyncIterator[None]:
        """Hold the turn in which an actor of a role can start: for an engine it is waited for, ranks get it at once."""
        if not self._takes_turns or role not in (ENGINES, RANKS):
            yield
        elif role == RANKS:
            await self._have_engines_sleep()
            yield
        else:
            async with self._changed:
                await self._changed.wait_for(lambda: self._turn == ENGINES)
                self._num_starting += 1
            try:
                yield
            finally:
                self._num_starting -= 1
                async with self._changed:
                    self._changed.notify_all()

    async def _have_engines_sleep(self) -> None:
        """Have engines and scorers leave the devices, once no engine starts. One that fails is ended: the supervisor
        makes another."""
        if self._turn == RANKS:
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._num_starting)
            self._turn = RANKS
        self._fleet.remove(await self._failing(ENGINES, "sleep"))
        self._fleet.kill(await self._failing(SCORERS, "leave_device"))

    async def _failing(self, role: str, method: str) -> list[str]:
        """Call a method of all members of a role. Returns the names of those that are gone, or do not answer in time.
        Raises an error that others would have, too."""
        calls: list[tuple[str, Any]] = [
            (name, getattr(handle, method).remote()) for name, handle in self._fleet.role(role)
        ]
        phase = f"{role}: {method.replace('_', ' ')}"
        found = await outcomes(calls, phase=phase, timeout_s=self._config.weights.phase_timeout_s)
        return failed({name: result for (name, _), result in zip(calls, found, strict=True)})
