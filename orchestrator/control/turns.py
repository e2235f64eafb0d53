"""Turns of engines and ranks on hardware that they share: GPUs (`DeviceTurns`, `placement=colocated`), or the CPUs of
one machine (`CpuTurns`).

GPUs:

    generation:  ranks have made room, engines are awake and load the newest version ─▶ the store has a batch
    training:    engines sleep, scorers have made room, ranks are back ─▶ update, publication

A replacement starts when it is its turn: an engine or a scorer when the ranks have made room, ranks while engines
sleep. An engine that is lost in its turn is started in it, and one that is lost asleep in the next. Ranks that are lost
while engines generate are missed when they are to come back, and a step that is made again begins with a turn of the
engines: a new store may lack some of its samples.

Engines keep no weights while they sleep: after `generation` they sample once they have loaded a version. The step that
is made again has them load the one that they had. A scorer comes back by itself when it has rows to compute, which is
while engines generate. Rank i, engine i and rank i of a scorer have one GPU: `placement/reservation.py`. With devices
of their own, all are there all the time, and none waits for a turn.

CPUs: engines and ranks work at the same time or take turns, whichever makes a step faster. The seconds of steps decide,
since a trial before the run knows neither how long responses will be nor which other processes compute there.

    at the same time   up to `max_staleness` steps of prompts are ahead, threads as the trial has found for both
    in turns           the prompts of one step at a time: the ranks wait for engines, engines for the new version, and
                       each side has the threads with which it was fastest alone

Taking turns never makes a token staler. It pays where both sides keep all cores busy by themselves: what they do at the
same time then takes as long as one after the other, and longer by what they take from each other.
"""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.conf.weights import scorers_share_gpus
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.placement.threads import are_tried
from penstock.orchestrator.cluster.ray_calls import Handles, answer, answers, call_all, failed, try_all
from penstock.store.client.store_client import StoreClient

ENGINES, RANKS, SCORERS = "rollout", "trainer", "scorer"
"""Roles that take turns, and the one that makes room for ranks."""


class DeviceTurns:
    """Lifecycle: `generation` before the first batch is waited for, then `training` and `generation` in turn; `hold`
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
        """Number of engines and scorers that start in this turn."""
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
        timeout_s = self._config.weights.phase_timeout_s
        await call_all(self._fleet.role(RANKS), "take_device", phase="trainer: take device", timeout_s=timeout_s)

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
    async def hold(self, role: str) -> AsyncIterator[None]:
        """Hold the turn in which an actor of a role can start: ranks get it at once, for an engine it is waited for,
        and for a scorer on its GPU."""
        late = (ENGINES, SCORERS) if scorers_share_gpus(self._config) else (ENGINES,)
        if not self._takes_turns or role not in (*late, RANKS):
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
        """Have engines and scorers leave the devices, once none of them starts. One that fails is ended: the supervisor
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
        Raises an error that a new process would have, too."""
        members, phase = self._fleet.role(role), f"{role}: {method.replace('_', ' ')}"
        found = await try_all(members, method, phase=phase, timeout_s=self._config.weights.phase_timeout_s)
        return failed({name: result for (name, _), result in zip(members, found, strict=True)})


TRIED, RESTS = 4, 60
"""Number of steps by which a way is measured, and of those before the other one is tried again: responses grow."""


FASTER = 0.95
"""Factor of a step's seconds at which the other way is taken: medians of so few steps differ by as much."""


@dataclass
class TurnChoice:
    """The choice. Pure: `note` each step. The present way is measured, then the other one, then the better one is
    kept."""

    settles: int
    """Number of steps after a change that tell nothing: what was ahead is used up, or made."""
    takes_turns: bool = False
    _before: bool | None = None
    """The way before the other one was tried; None: the other one is not tried now."""
    _steps: int = 0
    """Number of steps since the last change or choice."""
    _due: int = 0
    """Number of steps after which the other way is tried."""
    _seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds of the measured steps, at the same time and in turns."""

    def note(self, seconds: float | None) -> tuple[float, float] | None:
        """Note a step. `seconds`: None for one that had more to do than usual, such as an evaluation. Returns the
        median seconds at the same time and in turns where the way has just been chosen by them."""
        self._steps += 1
        measured = self._seconds[self.takes_turns]
        if self._steps > self.settles and seconds is not None:
            measured.append(seconds)
        if self._before is None:
            del measured[:-TRIED]
            if len(measured) == TRIED and self._steps >= self._due:
                self._before, self.takes_turns, self._steps = self.takes_turns, not self.takes_turns, 0
                self._seconds[self.takes_turns] = []
            return None
        if len(measured) < TRIED:
            return None
        medians = {way: statistics.median(values) for way, values in self._seconds.items()}
        if medians[self.takes_turns] > FASTER * medians[self._before]:
            self.takes_turns = self._before
        self._before, self._steps = None, 0
        self._due = RESTS
        return medians[False], medians[True]


class CpuTurns:
    """Lifecycle: `after` each step, while the ranks wait for the next one."""

    def __init__(self, fleet: Fleet, note: Callable[[str], None]) -> None:
        """`note`: tells people what was chosen."""
        config = fleet.config
        self._fleet, self._note = fleet, note
        self._pace = TurnChoice(config.max_staleness + 2, fleet.takes_turns) if _can_choose(fleet) else None
        self._last: float | None = None
        self._was_plain = True

    @property
    def max_active_groups(self) -> int | None:
        """Most groups between admission and publication; None: as many as the configuration has."""
        takes_turns = self._pace is not None and self._pace.takes_turns
        return self._fleet.config.trainer.groups_per_step if takes_turns else None

    async def after(self, now: float, *, is_plain: bool) -> None:
        """Note the end of a step. `now`: seconds of any clock. `is_plain`: neither an evaluation nor a checkpoint
        follows it, which the next step would have beside it."""
        if self._pace is None:
            return
        last, self._last = self._last, now
        counts, self._was_plain = is_plain and self._was_plain, is_plain
        before = self._pace.takes_turns
        if found := self._pace.note(now - last if counts and last is not None else None):
            together, turns = found
            way = "take turns" if self._pace.takes_turns else "work at the same time"
            self._note(
                f"engines and ranks {way} on the CPUs: {together:.2f} s a step at the same time, {turns:.2f} in turns"
            )
        if self._pace.takes_turns != before:
            self._fleet.takes_turns = self._pace.takes_turns
            timeout_s = self._fleet.config.rollout.start_timeout_s
            with contextlib.suppress(PenstockError):  # a lost member gets its number when it is made again
                await answers(thread_calls(self._fleet), phase="use threads", timeout_s=timeout_s)


def thread_calls(fleet: Fleet) -> Handles:
    """Calls that tell all engines and ranks their numbers of threads."""
    members = [*fleet.role("rollout"), *fleet.role("trainer")]
    return [(name, handle.use_threads.remote(fleet.threads_of(name))) for name, handle in members]


def _can_choose(fleet: Fleet) -> bool:
    """Return whether the run has one kind of node, which all engines and ranks share, and steps enough to try."""
    if not are_tried(fleet.config) or len(fleet.trials) != 1 or fleet.config.trainer.max_steps < RESTS:
        return False
    (node,) = fleet.trials
    return (node.engines, node.ranks) == (len(fleet.role("rollout")), len(fleet.role("trainer")))
