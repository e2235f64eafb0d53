"""Judges by the answers to heartbeats whether a member is alive, silent or stuck. Pure: time is an argument.

    SILENT   no answer for faults.heartbeat_timeout_s: stopped, its node is gone, or one call holds Python's lock
    STUCK    it answers, but has been in one phase for longer than that phase may take; or it is an engine that has
             samples in flight and makes no token for faults.stall_s

Time counts as the watcher lived it: where it did not run itself for a while (its machine was suspended, its process
stopped), no member is blamed for the gap. The member's own clock tells how long it has been in a phase.
"""

from dataclasses import dataclass
from enum import Enum

from penstock.conf.faults import FaultsConfig
from penstock.conf.run import RunConfig
from penstock.conf.weights import SYNC_PHASES
from penstock.workers.progress import (
    COMPUTING,
    EXPORTING,
    LOADING,
    PUBLISHING,
    RESUMING,
    SAVING,
    STARTING,
    UPDATING,
    Progress,
)

MOST_BEATS = 2
"""Most heartbeats that may pass between two looks; a longer time was a gap in the watcher's own life."""


class State(Enum):
    ALIVE = "alive"
    SILENT = "silent"
    STUCK = "stuck"


@dataclass(frozen=True)
class Verdict:
    state: State
    reason: str = ""
    """The reason of SILENT and STUCK, in words."""


ALIVE = Verdict(State.ALIVE)


def deadlines_of(role: str, config: RunConfig) -> dict[str, float]:
    """Seconds that a member of this role may be in a phase, by phase. Phases that have none end when others do."""
    sync_s = SYNC_PHASES * config.weights.phase_timeout_s
    deadlines = {STARTING: config.rollout.start_timeout_s}
    if role == "rollout":
        return deadlines | {LOADING: sync_s}
    if role == "trainer":
        checkpoint_s, step_s = config.checkpoint.timeout_s, config.trainer.step_timeout_s
        saving = dict.fromkeys((SAVING, RESUMING), checkpoint_s)
        return (
            deadlines | saving | {UPDATING: step_s, PUBLISHING: sync_s, EXPORTING: config.trainer.collective_timeout_s}
        )
    return deadlines | {COMPUTING: config.trainer.step_timeout_s}


class Liveness:
    """The liveness of one incarnation of a member. Lifecycle: `heard` for each answer, `judge` at least once a
    heartbeat."""

    def __init__(self, role: str, config: RunConfig, now: float) -> None:
        self._faults, self._deadlines = config.faults, deadlines_of(role, config)
        self._is_engine = role == "rollout"
        self._lived = _Lived(config.faults, now)
        self._heard_s = 0.0
        self._moved_s = 0.0
        self._last: Progress | None = None

    def heard(self, now: float, progress: Progress) -> None:
        self._heard_s = self._lived.until(now)
        if self._moves(progress):
            self._moved_s = self._heard_s
        self._last = progress

    @property
    def tokens_in_flight(self) -> int:
        """Tokens in flight, as of the member's last answer."""
        return self._last.tokens_in_flight if self._last is not None else 0

    def judge(self, now: float) -> Verdict:
        lived_s, faults = self._lived.until(now), self._faults
        if (silent_s := lived_s - self._heard_s) >= faults.heartbeat_timeout_s:
            return Verdict(State.SILENT, f"no answer to a heartbeat for {silent_s:.0f} s")
        if self._last is None:
            return ALIVE
        phase, seconds = self._last.phase, self._last.phase_s
        if seconds > (most_s := self._deadlines.get(phase, float("inf"))):
            return Verdict(State.STUCK, f"{phase} for {seconds:.0f} s, and {most_s:g} s are its deadline")
        if (stalled_s := self._heard_s - self._moved_s) >= faults.stall_s:
            return Verdict(
                State.STUCK, f"{self._last.num_in_flight} samples in flight and no token for {stalled_s:.0f} s"
            )
        return ALIVE

    def _moves(self, progress: Progress) -> bool:
        """Return whether the member makes tokens, or has none to make now. A phase with a deadline is judged by that
        alone."""
        if not self._is_engine or self._last is None or not self._last.num_in_flight or not progress.num_in_flight:
            return True
        return progress.num_done != self._last.num_done or progress.phase in self._deadlines


class _Lived:
    """Counts the seconds in which the watcher itself ran."""

    def __init__(self, faults: FaultsConfig, now: float) -> None:
        self._most_s = MOST_BEATS * faults.heartbeat_s
        self._last, self._seconds = now, 0.0

    def until(self, now: float) -> float:
        self._seconds += min(max(0.0, now - self._last), self._most_s)
        self._last = now
        return self._seconds
