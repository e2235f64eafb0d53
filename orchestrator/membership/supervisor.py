"""Keeps the members of a run serving: one that dies is replaced while the others go on.

    serving ─ its call fails ─▶ lost ─ a pause ─▶ another starts ─▶ it catches up ─▶ serving

A member that has only lost its connection to the store is not replaced: it serves again over a new one. Each
replacement is a restart of its own (`restarts.py`). What cannot be helped here is raised: the run then returns to
its last checkpoint, or ends. Environments hear which engines there are.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from penstock.conf.errors import PartnerGone, StoreDied, WorkerDied
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import (
    CAUSE_GRACE_S,
    PRESENT_S,
    Handles,
    cause_of,
    is_recoverable,
    outcomes,
    translate,
)
from penstock.orchestrator.membership.restarts import Restarts, title_of
from penstock.orchestrator.membership.run_context import RunContext
from penstock.orchestrator.membership.store_recovery import StoreRecovery
from penstock.store.errors import StoreError, StoreUnreachable
from penstock.store.service.store_actor import STORE

CatchUp = Callable[[Handles], Awaitable[None]]
LOOK_S = 0.1
"""Seconds between two looks at which engines there are."""
TELL_S = 10.0
"""Deadline for an environment to answer; one that does not is told again."""


class Supervisor:
    """Lifecycle: `keep` for each team of actors that serve by themselves, `close` once nothing is to be served."""

    def __init__(
        self,
        context: RunContext,
        restarts: Restarts,
        stores: StoreRecovery,
        tokens_in_flight: Callable[[Sequence[str]], int] = lambda names: 0,
        turn_of: Callable[[str], AbstractAsyncContextManager[None]] = lambda role: contextlib.nullcontext(),
    ) -> None:
        """`tokens_in_flight`: the number that given members had under way. `turn_of`: holds the turn in which a member
        of a role can start, where devices are shared."""
        self._fleet, self._store = context.fleet, context.store
        self._directory, self._progress = context.directory, context.progress
        self._faults = context.config.faults
        self._restarts, self._stores, self._tokens_in_flight = restarts, stores, tokens_in_flight
        self._turn_of, self._closing = turn_of, False
        self._leaving: set[str] = set()

    async def keep(self, role: str, team: Sequence[str], catch_up: CatchUp | None = None) -> None:
        """Serve with an actor, or with all ranks of a gang, and with others in their place when they fail.

        `catch_up`: what new members do before they serve. None: no other can take their place, and a failure is raised.
        Raises what ends the run, or takes it back to its checkpoint.
        """
        num_lost = 0
        while True:
            incarnation, began = self._stores.incarnation, asyncio.get_running_loop().time()
            failure = await self._serve(team)
            if failure is None or self._leaving.intersection(team):
                return
            if not is_recoverable(failure):
                raise failure
            if self._closing:  # also one that came too late to serve at all
                return
            if await self._stores.recovered(failure, incarnation):
                continue
            num_lost = num_lost + 1 if asyncio.get_running_loop().time() - began < self._faults.window_s else 1
            if num_lost <= self._faults.max_restarts and await self._has_lost_connection_only(team, failure):
                self._directory.event("reconnected", role=role, member=team[0], message=str(failure))
                await asyncio.sleep(self._faults.pause_s * (num_lost - 1))
                continue
            if catch_up is None:
                self._restarts.beyond_help(role, title_of(team), failure)
                raise failure
            if self._leaving.intersection(team):
                return
            await self.replace(role, team, failure, catch_up)

    async def replace(self, role: str, team: Sequence[str], failure: Exception, catch_up: CatchUp) -> None:
        """Start other actors in place of a team that has failed. Raises the failure if that is not to be tried, or
        tried again."""
        title = title_of(team)

        async def start() -> None:
            self._fleet.remove(team)  # those of a start that has failed, too
            async with self._turn_of(role):
                await self._start(team, catch_up, title)

        async def restart() -> None:
            tokens = self._tokens_in_flight(team)
            self._fleet.remove(team)
            await self._restarts.start_anew(role, title, failure, start, tokens)

        await self._restarts.run(title, restart)

    def close(self) -> None:
        """Replace no member from now on: they end because the store has closed."""
        self._closing = True
        self._restarts.close(STORE)

    def let_go(self, name: str) -> None:
        """Note that a member leaves because it was asked to, or with its node: its end is no fault, and it is not
        replaced."""
        self._leaving.add(name)
        self._restarts.left(name)

    async def _serve(self, team: Sequence[str]) -> Exception | None:
        """Serve with a team. Returns the failure that ended it; None: there is nothing more to serve."""
        tasks = [asyncio.ensure_future(self._run(name)) for name in team]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:  # one has failed: its peers tell of it, or of the cause
                await asyncio.wait(pending, timeout=CAUSE_GRACE_S)
            failures = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        finally:
            for task in tasks:
                task.cancel()
        if not failures:
            return None
        cause = cause_of(failures)
        if not isinstance(cause, Exception):
            raise cause
        return cause

    async def _has_lost_connection_only(self, team: Sequence[str], failure: Exception) -> bool:
        """Return whether a member is well but for its connection to a store that is there. Ranks of a gang wait for
        each other, and begin anew together."""
        is_of_connection = isinstance(failure, PartnerGone | StoreUnreachable) and not isinstance(failure, StoreDied)
        if len(team) > 1 or not is_of_connection or (handle := self._fleet.handle_of(team[0])) is None:
            return False
        calls = [(team[0], handle.progress.remote())]
        (heard,) = await outcomes(calls, phase="look who is there", timeout_s=PRESENT_S)
        return not isinstance(heard, Exception)

    async def _run(self, name: str) -> None:
        """Run a member's pull loop. It ends when the store closes or the member was asked to leave, and not before."""
        if (handle := self._fleet.handle_of(name)) is None:
            raise WorkerDied(f"{name} was gone before it served.")
        try:
            await handle.run.remote(self._fleet.store)
        except Exception as error:  # noqa: BLE001 - every way in which an actor can fail has a named error
            raise translate(error, name) from None
        if not self._closing and name not in self._leaving:
            raise PartnerGone(f"{name} stopped serving before the run was over.")

    async def _start(self, team: Sequence[str], catch_up: CatchUp, title: str) -> None:
        with contextlib.suppress(StoreError):  # also what a machine holds that cannot say that it is gone
            for name in team:
                await self._stores.with_store(partial(self._store.abandon, name))
        before = {name: self._fleet.capacity.place_of(name) for name in team}
        members = await self._fleet.start_members(team)
        self._restarts.started(title)
        for name, place in before.items():
            if (now := self._fleet.capacity.place_of(name)) != place:
                self._directory.event("moved", member=name, node=now, before=place)
                self._progress.note(f"{name} has moved from {place} to {now}")
        await catch_up(members)
        self._fleet.add(members)


async def nothing_to_catch_up(members: Handles) -> None:
    """Do nothing, for members that have no state."""


class EngineDirectory:
    """Tells the environments which engines there are: whenever one has joined, died, or taken another's place.

    An engine is in its role only once it serves the newest weights, so an environment never samples under older ones
    than the store allows.

    Lifecycle: `tell` once before the environments serve, then `run` until it is cancelled.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engines: Handles = []
        self._version = 0
        """The list's version: engines are compared once a look, and not once for each environment."""
        self._told: dict[str, tuple[Any, int]] = {}
        """Handle of each environment, and the version that it knows, by name."""

    async def run(self) -> None:
        while True:
            await self.tell()
            await asyncio.sleep(LOOK_S)

    async def tell(self) -> None:
        """Tell the environments that do not know the present engines yet."""
        engines = self._fleet.role("rollout")
        if engines != self._engines:
            self._engines, self._version = engines, self._version + 1
        version, environments = self._version, self._fleet.role("environment")
        behind = [(name, handle) for name, handle in environments if self._told.get(name) != (handle, version)]
        calls = [(name, handle.engines.remote(engines)) for name, handle in behind]
        heard = await outcomes(calls, phase="tell the engines", timeout_s=TELL_S) if calls else []
        for (name, handle), answer in zip(behind, heard, strict=True):
            if not isinstance(answer, Exception):
                self._told[name] = (handle, version)
