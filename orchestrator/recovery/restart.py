"""Restart: what is lost starts again while the rest of the run continues. `control/step_loop.py` restarts the ranks.

    Restarts       the restarts that are under way, of members, the ranks and the store, side by side
    StoreRestart   the store: from its last snapshot, with what was trained since
    Supervisor     members that serve by themselves

A restart is a task of its own:

    a caller notices a loss ──▶  note ─▶ decide ─▶ pause ─▶ start ─▶ note  ◀── others that notice it wait for it
                                            ▲────── failed ◀──┘

It belongs to no caller: the deadline or the end of a caller does not end it. It ends when it is done or has failed,
when its member is to leave, or with the run. Each call within it has a deadline. A restart that meets another loss
waits for that one's restart:

    node ─▶ store ─▶ ranks ─▶ engines and all other members

What is to be done about a loss is decided in `decisions.py`. What no restart can help is raised: the run then returns
to its last checkpoint (`resume.py`), or ends.

The store:

    snapshots, by themselves      every faults.store_snapshot_s
    a call fails ─▶ is the store there? ─▶ another from the snapshot ─▶ catch_up(rows trained since) ─▶ members serve it

Rows that were not trained return with their number and seed (`store/ledger/ledger.py`). The journal says which rows
each step has trained:

    all ranks have made a step ─▶ note: the run's owner has it ─▶ the store is told

    rows      for a store that takes the place of a lost one      until a snapshot of the store has them
    reports   for the next command: to tell the store of them,    until the lines of their steps are written
              and to write their lines in metrics.jsonl

The owner keeps the reports in its memory, so a full disk stops no step. A step that was noted counts, whichever command
completes it. A resume reads no journal: it begins with the snapshot of its checkpoint.

Members:

    serving ─ its call fails ─▶ lost ─ a pause ─▶ another starts ─▶ it catches up ─▶ serving
    serving ─ its call returns, as it is lent ─▶ it is back ─▶ serving

A member that has only lost its connection to the store is not replaced: it serves again over a new one.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from penstock.conf.errors import PartnerGone, PenstockError, StoreDied, WorkerDied
from penstock.metering.meters import Meters
from penstock.metering.table import RUN_LOST, RUN_REPLACED
from penstock.orchestrator.cluster.fleet.fleet import StoreProcess
from penstock.orchestrator.cluster.fleet.member_table import LOOK_S
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.ray_calls import (
    CAUSE_GRACE_S,
    GRACE_S,
    PRESENT_S,
    Handles,
    Kind,
    answer,
    cause_of,
    first_line,
    is_recoverable,
    kind_of,
    look,
    outcomes,
    translate,
    try_all,
)
from penstock.orchestrator.recovery.decisions import Restart, RunFaults
from penstock.orchestrator.recovery.ended_ranks import named_failure
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.errors import StoreError, StoreUnreachable
from penstock.store.service.store_actor import STORE
from penstock.workers.trainer.step_report import StepReport


class Restarts:
    """Lifecycle: `run` for each loss, from any task; `forget` for members that leave, `close` once nothing is to be
    served, `end` with the run."""

    def __init__(
        self,
        directory: RunDirectory,
        note: Callable[[str], None],
        faults: RunFaults,
        meters: Meters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note`: called with what people read. `meters`: those that count losses."""
        self.step = 0
        """The step that the run is at."""
        self._directory, self._note = directory, note
        self._faults, self._clock = faults, clock
        self._meters = meters or Meters()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Restarts under way, by title."""

    def is_under_way(self, title: str) -> bool:
        return title in self._tasks

    async def wait_for(self, title: str) -> bool:
        """Wait for the restart of this title that is under way, as `run` does. Returns whether there was one."""
        if (task := self._tasks.get(title)) is None:
            return False
        await asyncio.shield(task)
        return True

    async def run(self, title: str, restart: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until the restart of this title is done: the one under way, or this one. Raises what it fails with, and
        `CancelledError` where it was cancelled."""
        if (task := self._tasks.get(title)) is None:
            task = self._tasks[title] = asyncio.create_task(restart(), name=f"restart of {title}")
            task.add_done_callback(lambda ended: self._remove(title, ended))
        await asyncio.shield(task)

    async def start_replacement(
        self, role: str, title: str, failure: Exception, start: Callable[[], Awaitable[None]], tokens: int = 0
    ) -> None:
        """Start what takes the place of a lost member, as often as that is to be tried; within its restart. Raises the
        failure if it is not to be tried, or not any more. `tokens`: the number that were under way, and are made
        again."""
        began = self._clock()
        self._note_fault(role, title, failure)
        self._note(f"{title} is lost and is being replaced: {first_line(failure)}")
        decision = self._faults.lost(title, role, began, self.step)
        while isinstance(decision, Restart):
            await asyncio.sleep(decision.after_s)
            try:
                await start()
                break
            except PenstockError as again:
                if not is_recoverable(again):
                    raise
                self._note_fault(role, title, again)
                decision = self._faults.failed(title, self._clock(), self.step)
        else:
            raise failure
        seconds = self._faults.caught_up(title, self._clock())
        about = {"role": role, "member": title, "step": self.step, "tokens_again": tokens}
        self._directory.event("recovered", **about, seconds=round(seconds, 3))
        self._meters.add(RUN_REPLACED, member_role=role)
        self._note(f"{title} serves again after {seconds:.1f} s")

    def begin_steps(self, step: int, num_engines: int) -> None:
        """Note that steps are made from now on, after `step`."""
        self._faults.time.begin(step, num_engines, self._clock())

    def trained(self, step: int, tokens: int, num_engines: int) -> None:
        """Note that a step is committed, with its number of response tokens. `num_engines`: those that serve now."""
        self._faults.time.trained(step, tokens, self._clock(), num_engines)

    def metrics(self) -> dict[str, float]:
        """Cumulative metrics of losses, and of the time that they have cost."""
        return self._faults.metrics(self._clock())

    def give_up(self, role: str, title: str, failure: Exception) -> None:
        """Note a loss after which no new process alone can help, before the failure is raised."""
        if is_recoverable(failure):
            self._note_fault(role, title, failure)
            self._faults.decide_return(title, role, self._clock(), self.step)

    def forget(self, name: str) -> None:
        """Note that a member has left for good: nothing takes its place."""
        self._cancel(name)
        self._faults.gone(name, self._clock())

    def close(self, *but: str) -> None:
        """Cancel what is under way, but for the restarts of these titles."""
        self._cancel(*(self._tasks.keys() - set(but)))

    async def end(self) -> None:
        """Cancel what is under way, and wait until it has ended: the run ends, or returns to its checkpoint."""
        tasks = list(self._tasks.values())
        self.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, *titles: str) -> None:
        for title in titles:
            if title in self._tasks:
                self._tasks[title].cancel()

    def _note_fault(self, role: str, title: str, failure: Exception) -> None:
        about = {"role": role, "member": title, "step": self.step, "error": type(failure).__name__}
        self._directory.event("fault", **about, message=str(failure))
        self._meters.add(RUN_LOST, member_role=role)

    def _remove(self, title: str, task: "asyncio.Task[None]") -> None:
        del self._tasks[title]
        if not task.cancelled():
            task.exception()  # a failure that no caller waits for any more: the next one meets the loss itself


def title_of(team: Sequence[str]) -> str:
    """The name that people read: that of the member, or the first and last of a gang.

    >>> title_of(["Scorer-reference-0", "Scorer-reference-1"])
    'Scorer-reference-0 to Scorer-reference-1'
    """
    return team[0] if len(team) == 1 else f"{team[0]} to {team[-1]}"


ROLE, STAGE = "store", "train"
AGAIN_S = 5.0
"""Seconds until a first snapshot is tried again, where no further ones are taken."""
MOST_DOUBLINGS = 5
"""Most doublings of the pause after snapshots that failed: a slow disk is not kept busy by them."""
T = TypeVar("T")


class StepJournal:
    """Lifecycle: `note` each step once all ranks have made it; then `written` and `forget`, in any order."""

    def __init__(self, owner: Owner, last: int, unwritten: Mapping[int, Sequence[StepReport]] | None = None) -> None:
        """`last`: the last step before this process. `unwritten`: reports that the process before has noted, of steps
        whose lines are not written yet. A process after this one needs them, too."""
        self.last = last
        """The step that was made last."""
        self._owner = owner
        self._rows: dict[int, np.ndarray] = {}
        """Row ids by step."""
        self._unwritten: dict[int, Sequence[StepReport]] = dict(unwritten or {})

    async def note(self, step: int, reports: Sequence[StepReport]) -> None:
        """Note a step that all ranks have made, before the store knows of it. Raises `TakenOver`, and what a lost
        owner fails with."""
        self._rows[step] = np.concatenate([report.row_ids for report in reports])
        self._unwritten[step] = list(reports)
        self.last = step
        await self._owner.note(self._unwritten)

    def rows_after(self, step: int) -> list[list[int]]:
        """Row ids of each step after that one, in order."""
        return [self._rows[number].tolist() for number in range(step + 1, self.last + 1)]

    def forget(self, step: int) -> None:
        """Forget the rows of the steps up to that one: a snapshot of the store has them."""
        self._rows = {number: rows for number, rows in self._rows.items() if number > step}

    def written(self, step: int) -> None:
        """Note that the line of a step is written."""
        self._unwritten.pop(step, None)


class StoreRestart:
    """Lifecycle: `trained` for each step and `served` for each version; `take_snapshots` until it is cancelled. Any
    other call of the store goes through `retry`, or its failure to `wait_for_restart`."""

    def __init__(self, context: RunContext, restarts: Restarts, journal: StepJournal) -> None:
        self.incarnation = 0
        """Number of stores before this one."""
        self._fleet, self._store, self._restarts, self.journal = context.fleet, context.store, restarts, journal
        self._directory = context.directory
        self._epoch = self._fleet.owner.epoch
        self._every_s = context.config.faults.store_snapshot_s
        """Seconds between snapshots; 0: none is taken, and another store begins with what the run began with."""
        self._timeout_s = context.config.rollout.start_timeout_s
        """Deadline for a snapshot to be written, and to be read."""
        self._told = self._version = journal.last
        """The last step and the newest version that the store knows of."""
        resumed, begun = self._fleet.resumed, 0 if self._fleet.resumed is None else self._fleet.resumed.step
        self._is_known = journal.last == begun
        """True if the snapshot and the journal together are the store: not yet where another process has trained."""
        self._snapshot = resumed.store if resumed is not None and self._is_known else None
        self._snapshotting, self._looking = asyncio.Lock(), asyncio.Lock()

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of the store, or of the one that takes its place."""
        while True:
            incarnation = self.incarnation
            try:
                return await call()
            except PenstockError as failure:
                if not await self.wait_for_restart(failure, incarnation):
                    raise

    async def wait_for_restart(self, failure: Exception, incarnation: int) -> bool:
        """Wait for the store's restart, if that is why a call has failed. Returns whether it is. `incarnation`: that of
        the store when the call began. Raises the failure where the store cannot be replaced, or a node is gone with all
        that is on it: no member can be helped alone then."""
        if kind_of(failure) is not Kind.CONSEQUENCE:  # as every call of a store that is gone fails
            return False
        async with self._looking:
            if incarnation != self.incarnation or await self._restarts.wait_for(STORE):
                return True
            if await self._is_there(failure):
                return False
            if not self._is_known:
                self._restarts.give_up(ROLE, STORE, failure)
                raise failure
            await self._restarts.run(STORE, lambda: self._restarts.start_replacement(ROLE, STORE, failure, self._start))
            return True

    async def was_restarted(self, incarnation: int) -> bool:
        """Return whether the store is another than at that incarnation, once it is there."""
        return await self._restarts.wait_for(STORE) or incarnation != self.incarnation

    async def trained(self, step: int, reports: Sequence[StepReport], incarnation: int) -> None:
        """Tell the store that a step of the journal was trained: its rows end. `incarnation`: that of the store which
        its batch came from. One that takes its place hears of the step as of all that were trained since its
        snapshot."""
        if incarnation == self.incarnation and not self._restarts.is_under_way(STORE):
            told = [self._store.complete_shared(report.share) for report in reports if report.share is not None]
            try:
                await self._in_time(asyncio.gather(*told))
                self._told = step
                return
            except PenstockError as failure:
                if not await self.wait_for_restart(failure, incarnation):
                    raise
        await self._restarts.wait_for(STORE)
        await self.retry(self._tell)

    async def served(self, version: int, max_active: int | None = None) -> None:
        """Tell the store that every engine serves a version, and of how many groups may be under way then."""
        await self.retry(lambda: self._store.served(version, self._epoch, max_active))
        self._version = version

    async def take_back_batch(self) -> int:
        """Take back the batch that is under way. Returns the step that was trained last."""
        return int(await self.retry(lambda: self._store.settle(STAGE, self._epoch)))

    async def take_snapshots(self) -> None:
        """Take snapshots. One that fails is left out: the one before stays, the next pause is longer, and the first
        failure in a row is an event, unless the store is gone, which its callers hear. The first is taken at once where
        the run resumed from a checkpoint, which may be gone after the next, or with a store that was there before this
        process."""
        number, num_failed = 1, 0
        pause_s = 0.0 if self._snapshot is not None or not self._is_known else self._every_s
        while self._every_s or not self._is_known:
            await asyncio.sleep(pause_s)
            try:
                async with self._snapshotting:
                    await self._take(number)
                number, num_failed = number + 1, 0  # only now: one that is not heard of pushes out no other
            except PenstockError as error:
                num_failed += 1
                if num_failed == 1 and kind_of(error) is not Kind.CONSEQUENCE:
                    self._directory.event("snapshot_failed", error=type(error).__name__, message=str(error))
            pause_s = (self._every_s or AGAIN_S) * 2 ** min(num_failed, MOST_DOUBLINGS)

    async def _is_there(self, failure: Exception) -> bool:
        """Return whether the store answers, and is to stay. Raises the failure if a node is gone."""
        agents = self._fleet.role("agent")
        asked = outcomes([(STORE, self._store.stats())], phase="look who is there", timeout_s=PRESENT_S)
        errors, (store,) = await asyncio.gather(look(agents), asked)
        for (name, _), error in zip(agents, errors, strict=True):
            if error is not None:
                self._restarts.give_up("agent", name, failure)
                raise failure
        return not isinstance(store, Exception) and not isinstance(failure, StoreDied)

    async def _start(self) -> None:
        """Start another store, and attach the ranks to it. Raises what starting it raised."""
        async with self._snapshotting:
            await self._process.replace(self._snapshot, self._timeout_s)
            await self._store.move(self._fleet.store)
            self._told = int(await self._in_time(self._store.settle(STAGE, self._epoch)))
            await self._tell()
            await self._fleet.attach_trainers()
            self.incarnation += 1

    async def _tell(self) -> None:
        """Tell the store of all steps that were trained and that it does not know."""
        last = self.journal.last
        steps = self.journal.rows_after(self._told)
        await self._in_time(self._store.catch_up(steps, self._version, self._epoch))
        self._told = last

    async def _take(self, number: int) -> None:
        told, place = self._told, await self._process.scratch(self._timeout_s)
        taken = self._store.snapshot(place, number, is_apart=True, timeout_s=self._timeout_s)
        self._snapshot = await self._in_time(taken, GRACE_S)
        self._is_known = True
        self.journal.forget(told)

    @property
    def _process(self) -> StoreProcess:
        assert self._fleet.store_process is not None  # who trains has one
        return self._fleet.store_process

    async def _in_time(self, call: Awaitable[Any], grace_s: float = 0.0) -> Any:
        timeout_s = self._timeout_s + grace_s
        return await answer(call, name=STORE, phase="bring the store back", timeout_s=timeout_s)


CatchUp = Callable[[Handles], Awaitable[None]]


class Supervisor:
    """Lifecycle: `keep` for each team of actors that serve by themselves, `close` once nothing is to be served."""

    def __init__(
        self,
        context: RunContext,
        restarts: Restarts,
        store: StoreRestart,
        tokens_in_flight: Callable[[Sequence[str]], int] = lambda names: 0,
        turn_of: Callable[[str], AbstractAsyncContextManager[None]] = lambda role: contextlib.nullcontext(),
    ) -> None:
        """`tokens_in_flight`: the number that given members had under way. `turn_of`: holds the turn in which a member
        of a role can start, where devices are shared."""
        self._fleet, self._client = context.fleet, context.store
        self._directory, self._progress = context.directory, context.progress
        self._faults = context.config.faults
        self._restarts, self._store, self._tokens_in_flight = restarts, store, tokens_in_flight
        self._turn_of, self._closing = turn_of, False
        self._leaving: set[str] = set()

    async def keep(self, role: str, team: Sequence[str], catch_up: CatchUp | None = None) -> None:
        """Serve with an actor, or with all ranks of a gang, and replace them when they fail.

        `catch_up`: what new members do before they serve. None: no other can take their place, and a failure is raised.
        Raises what ends the run, or takes it back to its checkpoint.
        """
        num_lost = 0
        while True:
            incarnation, began = self._store.incarnation, asyncio.get_running_loop().time()
            failure = await self._serve(team)
            if failure is None or self._leaving.intersection(team):
                return
            failure = await self.named(team, failure)
            if not is_recoverable(failure):
                raise failure
            if self._closing:  # also one that came too late to serve at all
                return
            if await self._store.wait_for_restart(failure, incarnation):
                continue
            num_lost = num_lost + 1 if asyncio.get_running_loop().time() - began < self._faults.window_s else 1
            if num_lost <= self._faults.max_restarts and await self._has_lost_connection_only(team, failure):
                self._directory.event("reconnected", role=role, member=team[0], message=str(failure))
                await asyncio.sleep(self._faults.pause_s * (num_lost - 1))
                continue
            if catch_up is None:
                self._restarts.give_up(role, title_of(team), failure)
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
                await self._start(team, catch_up)

        async def restart() -> None:
            tokens = self._tokens_in_flight(team)
            self._fleet.remove(team)
            await self._restarts.start_replacement(role, title, failure, start, tokens)

        await self._restarts.run(title, restart)

    async def named(self, team: Sequence[str], failure: Exception) -> Exception:
        """The failure of a team; where NCCL's watchdog has ended its ranks, under the name of what it says."""
        return await named_failure(self._fleet, self._directory, team, failure)

    def close(self) -> None:
        """Replace no member from now on: they end because the store has closed."""
        self._closing = True
        self._restarts.close(STORE)

    def expect_end(self, name: str) -> None:
        """Note that a member leaves because it was asked to, or with its node: its end is no fault, and it is not
        replaced."""
        self._leaving.add(name)
        self._restarts.forget(name)

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
        (heard,) = await try_all([(team[0], handle)], "progress", phase="look who is there", timeout_s=PRESENT_S)
        return not isinstance(heard, Exception)

    async def _run(self, name: str) -> None:
        """Run a member's pull loop. It ends when the store closes or the member was asked to leave, and not before. One
        that is lent runs again once it is back."""
        while True:
            while self._fleet.is_lent(name):
                if self._closing:
                    return
                await asyncio.sleep(LOOK_S)
            num_loans = self._fleet.num_loans(name)
            if (handle := self._fleet.handle_of(name)) is None:
                raise WorkerDied(f"{name} was gone before it served.")
            try:
                await handle.run.remote(self._fleet.store)
            except Exception as error:  # noqa: BLE001 - every way in which an actor can fail has a named error
                raise translate(error, name) from None
            if self._closing or name in self._leaving:
                return
            if num_loans == self._fleet.num_loans(name):
                raise PartnerGone(f"{name} stopped serving before the run was over.")

    async def _start(self, team: Sequence[str], catch_up: CatchUp) -> None:
        with contextlib.suppress(StoreError):  # also what a machine holds that cannot say that it is gone
            for name in team:
                await self._store.retry(partial(self._client.abandon, name))
        before = {name: self._fleet.capacity.place_of(name) for name in team}
        members = await self._fleet.start_members(team)
        for name, place in before.items():
            if (now := self._fleet.capacity.place_of(name)) != place:
                self._directory.event("moved", member=name, node=now, before=place)
                self._progress.note(f"{name} has moved from {place} to {now}")
        await catch_up(members)
        self._fleet.add(members)


async def nothing_to_catch_up(members: Handles) -> None:
    """Do nothing, for members that have no state."""


@dataclass(frozen=True)
class Recovery:
    """The parts of a run that restart what is lost."""

    restarts: Restarts
    store: StoreRestart
    supervisor: Supervisor
