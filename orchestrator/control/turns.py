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

CPUs: engines and ranks work at the same time or take turns, whichever makes a step faster. Trials during the run
decide, since one before it knows neither how long responses will be nor which other processes compute there.

    at the same time   up to `max_staleness` steps of prompts are ahead, threads as the trial has found for both
    in turns           the prompts of one step at a time: the ranks wait for engines, engines for the new version, and
                       each side has the threads with which it was fastest alone

Taking turns never makes a token staler. It pays where both sides keep all cores busy by themselves: what they do at the
same time then takes as long as one after the other, and longer by what they take from each other.
"""

import asyncio
import contextlib
import math
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


TRIED, PAIRS = 5, 5
"""Number of steps of a block, by whose median a way is measured, and of pairs of blocks that a trial has at most."""
CLEAR = 0.25
"""Sum of the log ratios of two or more pairs that agree by which a trial ends sooner: of two, steps 1.13x as long."""
COST, LEAST_REST, LONGEST_REST = 0.01, 60, 960
"""Share of the time until the next trial that a trial may cost, and fewest and most steps until then."""
CHANGED = 1.25
"""Factor by which steps become longer or shorter, such as by longer responses, for a trial to come twice as soon."""


@dataclass
class TurnChoice:
    """The choice. Pure: `note` each step.

    A trial alternates blocks of steps in pairs, so that a machine that becomes slower meanwhile slows both ways alike:
    together, turns | turns, together | together, turns. It ends once all pairs agree, and the sum of their log ratios
    is `CLEAR` (a sequential test), or with the last one; the sum's sign decides. One pair never suffices: on a machine
    that others use, a whole block may take 1.5x as long as the next.
    """

    settles: int
    """Number of steps after a change that tell nothing: what was ahead is used up, or made."""
    takes_turns: bool = False
    _settling: int = field(init=False)
    """Number of steps to come that tell nothing; the first of a run are slow for reasons of their own."""
    _block: list[float] = field(default_factory=list)
    """Seconds of the steps of the block under way."""
    _blocks: list[tuple[bool, float]] = field(default_factory=list)
    """Ways and medians of the trial's blocks; between trials those of the last two."""
    _chosen: tuple[bool, float] | None = None
    """The way that the last trial has chosen, with its seconds of a step. None: the first trial is under way."""
    _rested: int | None = None
    """Number of steps since the last trial; None: one is under way."""
    _rest: float = LEAST_REST
    """Number of steps after which the next trial is due."""

    def __post_init__(self) -> None:
        self._settling = 2 * self.settles

    def note(self, seconds: float | None) -> tuple[float, float] | None:
        """Note a step. `seconds`: None for one that had more to do than usual, such as an evaluation. Returns the
        median seconds at the same time and in turns where the way has just been chosen by them."""
        if self._rested is not None:
            self._rested += 1
        if self._settling:
            self._settling -= 1
            return None
        if seconds is not None:
            self._block.append(seconds)
        if len(self._block) < TRIED:
            return None
        self._blocks.append((self.takes_turns, statistics.median(self._block)))
        self._block = []
        if self._rested is not None and not self._begins(self._rested):
            del self._blocks[:-2]
            return None
        if len(self._blocks) % 2:
            self._change()
            return None
        ratios = self._log_ratios()
        evidence = math.fsum(ratios)
        is_clear = len(ratios) > 1 and abs(evidence) >= CLEAR and all(ratio * evidence > 0 for ratio in ratios)
        return self._choose(evidence > 0) if is_clear or len(ratios) == PAIRS else None

    def _begins(self, rested: int) -> bool:
        """Return whether a trial begins, with the block that has just ended."""
        assert self._chosen is not None
        by_then = [abs(math.log(seconds / self._chosen[1])) for _, seconds in self._blocks[-2:]]
        has_changed = len(by_then) == 2 and min(by_then) > math.log(CHANGED)
        if rested < (max(LEAST_REST, self._rest / 2) if has_changed else self._rest):
            return False
        self._rested = None
        del self._blocks[:-1]
        return True

    def _log_ratios(self) -> list[float]:
        """Log ratios of the seconds at the same time to those in turns, by pair of blocks."""
        pairs = [dict(pair) for pair in zip(self._blocks[::2], self._blocks[1::2], strict=True)]
        return [math.log(pair[False] / pair[True]) for pair in pairs]

    def _change(self) -> None:
        self.takes_turns, self._settling = not self.takes_turns, self.settles

    def _choose(self, takes_turns: bool) -> tuple[float, float]:
        """End the trial. Returns the seconds of both ways."""
        together, turns = (statistics.median(s for way, s in self._blocks if way == one) for one in (False, True))
        kept, other = (turns, together) if takes_turns else (together, turns)
        lost = (self.settles + 2 * TRIED) * max(0.0, other / kept - 1)  # steps, in a trial of two pairs
        self._rest = min(max(lost / COST, LEAST_REST), LONGEST_REST)
        self._chosen, self._rested, self._blocks = (takes_turns, kept), 0, []
        if takes_turns != self.takes_turns:
            self._change()
        return together, turns


LEAST_STEPS = 60
"""Number of steps of a run that is worth a trial."""
MOST_LEFT_OUT = 8
"""Most steps in a row that do not count because of evaluations and checkpoints: from then on they are the rule."""


class CpuTurns:
    """Lifecycle: `after` each step, while the ranks wait for the next one."""

    def __init__(self, fleet: Fleet, note: Callable[[str], None]) -> None:
        """`note`: tells people what was chosen."""
        config = fleet.config
        self._fleet, self._note = fleet, note
        self._pace = TurnChoice(config.max_staleness + 2, fleet.takes_turns) if _can_choose(fleet) else None
        self._last: float | None = None
        self._was_plain = True
        self._num_left_out = 0
        """Number of steps in a row that had more to do."""

    @property
    def max_active_groups(self) -> int | None:
        """Most groups between admission and publication; None: as many as the configuration has."""
        takes_turns = self._pace is not None and self._pace.takes_turns
        return self._fleet.config.trainer.groups_per_step if takes_turns else None

    async def after(self, now: float, *, is_plain: bool) -> None:
        """Note the end of a step. `now`: seconds of any clock. `is_plain`: neither an evaluation nor a checkpoint
        runs or follows it, which the next step would have beside it."""
        if self._pace is None:
            return
        last, self._last = self._last, now
        self._num_left_out = 0 if is_plain and self._was_plain else self._num_left_out + 1
        self._was_plain, counts = is_plain, not 0 < self._num_left_out <= MOST_LEFT_OUT
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
    if not are_tried(fleet.config) or len(fleet.trials) != 1 or fleet.config.trainer.max_steps < LEAST_STEPS:
        return False
    (node,) = fleet.trials
    return (node.engines, node.ranks) == (len(fleet.role("rollout")), len(fleet.role("trainer")))
