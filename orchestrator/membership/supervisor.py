"""Keeps the members of a run serving: one that dies is replaced while the others go on, and its cost is told.

    serving ─ its call fails ─▶ lost ─ a pause ─▶ another starts ─▶ it catches up ─▶ serving

What to do about a loss is decided in `recovery.py`. What cannot be helped here is raised: the run then returns to its
last checkpoint, or ends.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from penstock.conf.errors import PartnerGone, PenstockError, WorkerDied
from penstock.metering.meters import Meters
from penstock.metering.table import MEMBER_ROLES, RUN_LOST, RUN_REPLACED
from penstock.orchestrator.cluster.failures import CAUSE_GRACE_S, Kind, cause_of, first_line, kind_of
from penstock.orchestrator.cluster.fleet.roster import Members
from penstock.orchestrator.cluster.ray_calls import PRESENT_S, is_recoverable, look, outcomes, translate
from penstock.orchestrator.membership.recoveries import Recoveries
from penstock.orchestrator.membership.recovery import Restart
from penstock.orchestrator.membership.restarts import Restarts
from penstock.orchestrator.membership.run_context import RunContext
from penstock.orchestrator.membership.store_recovery import StoreRecovery
from penstock.store.errors import StoreError
from penstock.store.service.actor import STORE

STORE_ROLE = "store"
T = TypeVar("T")
CatchUp = Callable[[Members], Awaitable[None]]


class Supervisor:
    """Lifecycle: `keep` for each team of actors that serve by themselves, `close` once nothing is to be served."""

    def __init__(
        self,
        context: RunContext,
        recoveries: Recoveries,
        clock: Callable[[], float] = time.monotonic,
        stores: StoreRecovery | None = None,
        tokens_in_flight: Callable[[Sequence[str]], int] = lambda names: 0,
        meters: Meters | None = None,
    ) -> None:
        """`stores`: brings the store back; None where it cannot be. `tokens_in_flight`: the number that given members
        had under way. `meters`: those that count losses."""
        self._meters = meters or Meters()
        for role in MEMBER_ROLES:
            self._meters.add(RUN_LOST, 0, member_role=role)
            self._meters.add(RUN_REPLACED, 0, member_role=role)
        self.step = 0
        """The step that the run is at."""
        self._fleet, self._store, self._recoveries = context.fleet, context.store, recoveries
        self._directory, self._progress, self._clock = context.directory, context.progress, clock
        self._closing = False
        self._restarts = Restarts()
        self._leaving: set[str] = set()
        self._stores, self._tokens_in_flight = stores, tokens_in_flight
        self._looking = asyncio.Lock()

    async def keep(self, role: str, team: Sequence[str], catch_up: CatchUp | None = None) -> None:
        """Serve with an actor, or with all ranks of a gang, and with others in their place when they fail.

        `catch_up`: what new members do before they serve. None: no other can take their place, and a failure is raised.
        Raises what ends the run, or takes it back to its checkpoint.
        """
        while True:
            stores = self.stores_before
            failure = await self._serve(team)
            if failure is None or self._leaving.intersection(team):
                return
            if not is_recoverable(failure):
                raise failure
            if self._closing:  # also one that came too late to serve at all
                return
            if await self.check_partners(failure, stores):
                continue
            if catch_up is None:
                self.beyond_help(role, title_of(team), failure)
                raise failure
            if self._leaving.intersection(team):
                return
            await self.replace(role, team, failure, catch_up)

    async def with_store(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of the store, or of the one that takes its place."""
        while True:
            stores = self.stores_before
            try:
                return await call()
            except PenstockError as failure:
                if not await self.check_partners(failure, stores):
                    raise

    @property
    def stores_before(self) -> int:
        """Number of stores that were lost."""
        return self._stores.generation if self._stores is not None else 0

    async def check_partners(self, failure: Exception, stores: int) -> bool:
        """Return whether the failure comes of the loss of a store that has been replaced since there had been `stores`,
        or is now. Raises the failure where the store cannot be replaced, or a node is gone with all that is on it: no
        member can be helped alone then."""
        if kind_of(failure) is not Kind.CONSEQUENCE:
            return False
        async with self._looking:
            return stores != self.stores_before or await self._look(failure)

    async def end(self) -> None:
        """End the restarts under way: the run ends, or returns to its checkpoint."""
        await self._restarts.end()

    async def _look(self, failure: Exception) -> bool:
        if await self._restarts.joined(STORE):  # the caller that noticed the loss waits no more
            return True
        agents = self._fleet.role("agent")
        asked = outcomes([(STORE, self._store.stats())], phase="look who is there", timeout_s=PRESENT_S)
        errors, (store,) = await asyncio.gather(look(agents), asked)
        for (name, _), error in zip(agents, errors, strict=True):
            if error is not None:
                self.beyond_help("agent", name, failure)
                raise failure
        if not isinstance(store, Exception):
            return False
        if self._stores is None:
            self.beyond_help(STORE_ROLE, STORE, failure)
            raise failure
        stores = self._stores

        async def start() -> None:
            await stores.bring_back()
            self._recoveries.started(STORE, self._clock())

        await self._restarts.done(STORE, lambda: self._bring_back(STORE_ROLE, STORE, failure, start))
        return True

    async def replace(self, role: str, team: Sequence[str], failure: Exception, catch_up: CatchUp) -> None:
        """Start other actors in place of a team that has failed. Raises the failure if that is not to be tried, or
        tried again."""
        title = title_of(team)

        async def start() -> None:
            self._fleet.remove(team)  # those of a start that has failed, too
            await self._start(team, catch_up, title)

        async def restart() -> None:
            tokens = self._tokens_in_flight(team)
            self._fleet.remove(team)
            await self._bring_back(role, title, failure, start, tokens)

        await self._restarts.done(title, restart)

    async def _bring_back(
        self, role: str, title: str, failure: Exception, start: Callable[[], Awaitable[None]], tokens: int = 0
    ) -> None:
        """Start what takes the place of a lost member, as often as that is to be tried. Raises the failure if it is
        not, or not any more. `tokens`: the number that were under way, and are made again."""
        began = self._clock()
        self._note_fault(role, title, failure)
        self._progress.note(f"{title} is lost, another takes its place: {first_line(failure)}")
        decision = self._recoveries.lost(title, role, began, self.step)
        while isinstance(decision, Restart):
            await asyncio.sleep(decision.after_s)
            self._recoveries.starting(title, self._clock())
            try:
                await start()
                break
            except PenstockError as again:
                if not is_recoverable(again):
                    raise
                self._note_fault(role, title, again)
                decision = self._recoveries.failed(title, self._clock(), self.step)
        else:
            raise failure
        seconds = self._recoveries.caught_up(title, self._clock())
        about = {"role": role, "member": title, "step": self.step, "tokens_again": tokens}
        self._directory.event("recovered", **about, seconds=round(seconds, 3))
        self._meters.add(RUN_REPLACED, member_role=role)
        self._progress.note(f"{title} serves again after {seconds:.1f} s")

    def beyond_help(self, role: str, title: str, failure: Exception) -> None:
        """Note a loss after which no new process alone can help, before the failure is raised."""
        if is_recoverable(failure):
            self._note_fault(role, title, failure)
            self._recoveries.beyond_help(title, role, self._clock(), self.step)

    def _note_fault(self, role: str, title: str, failure: Exception) -> None:
        self._directory.event("fault", **_facts(role, title, self.step, failure))
        self._meters.add(RUN_LOST, member_role=role)

    def close(self) -> None:
        """Replace no member from now on: they end because the store has closed."""
        self._closing = True
        self._restarts.cancel_all_but(STORE)

    def let_go(self, name: str) -> None:
        """Note that a member leaves because it was asked to, or with its node: its end is no fault, and it is not
        replaced."""
        self._leaving.add(name)
        self._restarts.cancel(name)
        self._recoveries.gone(name, self._clock())

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

    async def _run(self, name: str) -> None:
        """Run a member's pull loop. It ends when the store closes or the member was asked to leave, and not before."""
        if (handle := self._fleet.actors.get(name)) is None:
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
                await self.with_store(partial(self._store.abandon, name))
        before = {name: self._fleet.growth.place_of(name) for name in team}
        members = await self._fleet.replace(team)
        self._recoveries.started(title, self._clock())
        for name, place in before.items():
            if (now := self._fleet.growth.place_of(name)) != place:
                self._directory.event("moved", member=name, node=now, before=place)
                self._progress.note(f"{name} has moved from {place} to {now}")
        await catch_up(members)
        self._fleet.add(members)


async def nothing_to_catch_up(members: Members) -> None:
    """Do nothing, for members that have no state."""


def title_of(team: Sequence[str]) -> str:
    """The name that people read: that of the member, or the first and last of a gang.

    >>> title_of(["Scorer-reference-0", "Scorer-reference-1"])
    'Scorer-reference-0 to Scorer-reference-1'
    """
    return team[0] if len(team) == 1 else f"{team[0]} to {team[-1]}"


def _facts(role: str, title: str, step: int, error: Exception) -> dict[str, Any]:
    return {"role": role, "member": title, "step": step, "error": type(error).__name__, "message": str(error)}
