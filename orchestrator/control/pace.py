"""Engines and ranks that share the CPUs of one machine work at the same time or take turns, whichever makes a step
faster. Chosen by the seconds of steps, since a trial before the run knows neither how long responses will be nor who
else computes there.

    at the same time   up to `max_staleness` steps of prompts are ahead, threads as the trial has found for both
    in turns           the prompts of one step at a time: the ranks wait for engines, engines for the new version, and
                       each side has the threads with which it was fastest alone

Taking turns never makes a token staler. It pays where both sides keep all cores busy by themselves: what they do at the
same time then takes as long as one after the other, and longer by what they take from each other.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.placement.threads import are_tried
from penstock.orchestrator.cluster.ray_calls import answers

TRIED, RESTS = 4, 60
"""Number of steps by which a way is measured, and of those before the other one is tried again: responses grow."""
FASTER = 0.95
"""Factor of a step's seconds at which the other way is taken: medians of so few steps differ by as much."""


@dataclass
class Pace:
    """The choice. Pure: `note` each step. The present way is measured, then the other one, then the better goes on."""

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
        """Note a step. `seconds`: None for one that had more to do than others, such as an evaluation. Returns the
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
        self._pace = Pace(config.max_staleness + 2, fleet.takes_turns) if _can_choose(fleet) else None
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
            await self._tell()

    async def _tell(self) -> None:
        """Tell engines and ranks their threads. One that is lost meanwhile is told when it is made again."""
        roles = ("rollout", "trainer")
        members = [member for role in roles for member in self._fleet.role(role)]
        calls = [(name, handle.use_threads.remote(self._fleet.threads_of(name))) for name, handle in members]
        try:
            await answers(calls, phase="use threads", timeout_s=self._fleet.config.rollout.start_timeout_s)
        except PenstockError:  # whoever watches the members replaces it
            return


def _can_choose(fleet: Fleet) -> bool:
    """Return whether the run has one kind of node, which all engines and ranks share, and steps enough to try."""
    if not are_tried(fleet.config) or len(fleet.trials) != 1 or fleet.config.trainer.max_steps < RESTS:
        return False
    (node,) = fleet.trials
    return (node.engines, node.ranks) == (len(fleet.role("rollout")), len(fleet.role("trainer")))
