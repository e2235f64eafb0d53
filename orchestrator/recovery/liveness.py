"""Liveness of a run's actors: one that does not answer, or is stuck, is ended, and counts as lost as if it had died.

    every faults.heartbeat_s: progress of each actor ─▶ Liveness ─ silent or stuck ─▶ its stacks into the run's
                                                                                      directory ─▶ SIGKILL

    SILENT   no answer for faults.heartbeat_timeout_s: stopped, its node is gone, or one call holds Python's lock
    STUCK    it answers, but has been in one phase for longer than that phase may take; or it is an engine that has
             samples in flight and makes no token for faults.stall_s

Time counts as the watcher lived it: where it did not run itself for a while (its machine was suspended, its process
stopped), no member is blamed for the gap. The member's own clock tells how long it has been in a phase.

A caller that waits for a member or the store hears of its death, and has it restarted (`restart.py`). An agent that is
ended is a node that is lost.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.conf.faults import FaultsConfig
from penstock.conf.run import RunConfig
from penstock.conf.weights import SYNC_PHASES
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answer, outcomes
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.runtime.processes import ProcessId
from penstock.workers.runtime.serving import (
    COMPUTING,
    EXPORTING,
    KEEPING,
    LOADING,
    PUBLISHING,
    RESUMING,
    SAVING,
    SERVES,
    STARTING,
    UPDATING,
    Progress,
)

AGENT = "agent"
MOST_BEATS = 2
"""Most heartbeats that may pass between two looks; a longer time was a gap in the watcher's own life."""
MEMBER_S = 0.02
"""Seconds between two heartbeats for each member: more than 500 are asked more seldom than every ten seconds."""
LEAST_BEATS = 3
"""Fewest heartbeats within the time in which a member has to answer one."""
STACKS_S = 60.0
"""Deadline for an agent to read stacks, or to end a process."""


class VerdictKind(Enum):
    ALIVE = "alive"
    SILENT = "silent"
    STUCK = "stuck"


@dataclass(frozen=True)
class Verdict:
    state: VerdictKind
    reason: str = ""
    """The reason of SILENT and STUCK, in words."""


ALIVE = Verdict(VerdictKind.ALIVE)


def deadlines_of(role: str, config: RunConfig) -> dict[str, float]:
    """Seconds that a member of this role may be in a phase, by phase. Phases without a deadline end with those of other
    members."""
    sync_s = SYNC_PHASES * config.weights.phase_timeout_s
    deadlines = {STARTING: config.rollout.start_timeout_s}
    if role == "rollout":
        return {STARTING: config.rollout.engine_start_s, LOADING: sync_s}
    if role == "trainer":
        checkpoint_s, step_s = config.checkpoint.timeout_s, config.trainer.step_timeout_s
        saving = dict.fromkeys((SAVING, RESUMING), checkpoint_s)
        return (
            deadlines
            | saving
            | {UPDATING: step_s, PUBLISHING: sync_s}
            | dict.fromkeys((KEEPING, EXPORTING), config.trainer.collective_timeout_s)
        )
    return deadlines | {COMPUTING: config.trainer.step_timeout_s}


class Liveness:
    """The liveness of one incarnation of a member. Pure: time is an argument. Lifecycle: `heard` for each answer,
    `judge` at least once a heartbeat."""

    def __init__(self, role: str, config: RunConfig, now: float) -> None:
        self._faults, self._deadlines = config.faults, deadlines_of(role, config)
        self._is_engine = role == "rollout"
        self._lived = _WatcherTime(config.faults, now)
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
            return Verdict(VerdictKind.SILENT, f"no answer to a heartbeat for {silent_s:.0f} s")
        if self._last is None:
            return ALIVE
        phase, seconds = self._last.phase, self._last.phase_s
        if seconds > (most_s := self._deadlines.get(phase, float("inf"))):
            return Verdict(VerdictKind.STUCK, f"{phase} for {seconds:.0f} s, and {most_s:g} s are its deadline")
        if (stalled_s := self._heard_s - self._moved_s) >= faults.stall_s:
            return Verdict(
                VerdictKind.STUCK, f"{self._last.num_in_flight} samples in flight and no token for {stalled_s:.0f} s"
            )
        return ALIVE

    def _moves(self, progress: Progress) -> bool:
        """Return whether the member makes tokens, or has none to make now. A phase with a deadline is judged by that
        alone."""
        if not self._is_engine or self._last is None or not self._last.num_in_flight or not progress.num_in_flight:
            return True
        return progress.num_done != self._last.num_done or progress.phase in self._deadlines


class _WatcherTime:
    """Counts the seconds in which the watcher itself ran."""

    def __init__(self, faults: FaultsConfig, now: float) -> None:
        self._most_s = MOST_BEATS * faults.heartbeat_s
        self._last, self._seconds = now, 0.0

    def until(self, now: float) -> float:
        self._seconds += min(max(0.0, now - self._last), self._most_s)
        self._last = now
        return self._seconds


@dataclass
class _WatchedMember:
    """An incarnation of a member."""

    handle: Any
    role: str
    liveness: Liveness
    process: ProcessId | None = None
    """The process; None until the member has named it. A member that never does is ended by Ray."""
    said: Progress | None = None
    """The progress at the last heartbeat that the member answered."""


class Watch:
    """Lifecycle: `run` until it is cancelled."""

    def __init__(self, fleet: Fleet, config: RunConfig, directory: RunDirectory) -> None:
        self._fleet, self._config, self._directory = fleet, config, directory
        self._watched: dict[str, _WatchedMember] = {}

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            self._update_members()
            beat_s = beat_of(len(self._watched), self._config.faults)
            await self._ask(beat_s)
            await asyncio.gather(*(self._end(*lost) for lost in self._lost()))  # each may take minutes
            await asyncio.sleep(max(0.0, began + beat_s - time.monotonic()))

    def tokens_in_flight(self, names: Sequence[str]) -> int:
        """Response tokens that the given members had under way at their last heartbeats."""
        return sum(self._watched[name].liveness.tokens_in_flight for name in names if name in self._watched)

    def heard(self) -> dict[str, Progress]:
        """Progress of each member at the last heartbeat that it answered, by name."""
        return {name: one.said for name, one in self._watched.items() if one.said is not None}

    async def stacks(self, names: Sequence[str]) -> list[str]:
        """Write the stacks of the given members into the run's directory. Returns the files' names. The members
        continue meanwhile."""
        known = [(name, one) for name in names if (one := self._watched.get(name)) is not None]
        written = []
        for name, watched in known:
            if watched.process is not None:
                text = await self._do(name, watched, "dump_stacks", watched.process, name)
                written.append(self._directory.write_stacks(name, text))
        return written

    def _update_members(self) -> None:
        """Update the list of members: those that have come anew are watched anew."""
        there = self._present()
        for name in list(self._watched):
            if name not in there or there[name][0] is not self._watched[name].handle:
                del self._watched[name]
        for name, (handle, role) in there.items():
            if name not in self._watched:
                self._watched[name] = _WatchedMember(handle, role, Liveness(role, self._config, time.monotonic()))

    def _lost(self) -> list[tuple[str, _WatchedMember, Verdict]]:
        """Members that are silent or stuck, which are watched no longer, and why."""
        verdicts = [(name, one, one.liveness.judge(time.monotonic())) for name, one in self._watched.items()]
        lost = [(name, one, verdict) for name, one, verdict in verdicts if verdict.state is not VerdictKind.ALIVE]
        for name, _, _ in lost:
            del self._watched[name]
        return [(name, one, why) for name, one, why in lost if self._present().get(name, (None,))[0] is one.handle]

    def _present(self) -> dict[str, tuple[Any, str]]:
        """Handle and role of each member, by name."""
        return {name: (handle, role) for role, name, handle in self._fleet.watched}

    async def _ask(self, timeout_s: float) -> None:
        """Ask all members at once. One that does not answer in time is asked again."""
        members = list(self._watched.items())
        unknown = [(name, watched) for name, watched in members if watched.process is None]
        calls = [(name, watched.handle.process.remote(self._fleet.stacks_root)) for name, watched in unknown]
        handles = [(name, watched.handle) for name, watched in members]
        processes, answers = await asyncio.gather(
            outcomes(calls, phase="heartbeat", timeout_s=timeout_s),
            self._fleet.roll_call.ask(handles, "progress", phase="heartbeat", timeout_s=timeout_s),
        )
        for (_, watched), said in zip(unknown, processes, strict=True):
            watched.process = ProcessId.from_answer(said) or watched.process
        now = time.monotonic()
        for (_, watched), progress in zip(members, answers, strict=True):
            if not isinstance(progress, Exception):
                watched.said = progress or SERVES
                watched.liveness.heard(now, watched.said)

    async def _end(self, name: str, watched: _WatchedMember, verdict: Verdict) -> None:
        process, stacks = watched.process, "it has not said which process it is"
        if process is not None:
            stacks = await self._do(name, watched, "dump_stacks", process, name)
        file = self._directory.write_stacks(name, stacks)
        about = {"role": watched.role, "member": name, "state": verdict.state.value, "reason": verdict.reason}
        self._directory.event("ended", **about, stacks=file)
        if process is not None:
            await self._do(name, watched, "kill", process)
        self._fleet.owner.end(watched.handle)
        if self._fleet.is_lent(name) and self._fleet.handle_of(name) is watched.handle:
            self._fleet.remove([name])  # nobody else may call it, and hear that it is gone

    async def _do(self, name: str, watched: _WatchedMember, method: str, *arguments: Any) -> str:
        """The answer of the agent of the member's node; or why there is none. An agent has no agent: Ray ends it."""
        found = None if watched.role == AGENT else self._fleet.agent_of(name)
        if found is None or found[0] not in self._watched:
            return "there is no agent on its node that could tell its stacks"
        agent, handle = found
        try:
            call = getattr(handle, method).remote(*arguments)
            return str(await answer(call, name=agent, phase=method, timeout_s=STACKS_S))
        except PenstockError as error:
            return str(error)


def beat_of(num_members: int, faults: FaultsConfig) -> float:
    """Seconds between two heartbeats. Asking thousands costs more than learning of a hang a little later: they are
    asked up to `MOST_BEATS` times more seldom, as long as silence can be told from one lost answer.

    >>> [beat_of(count, FaultsConfig()) for count in (8, 600, 4096)]
    [10.0, 12.0, 20.0]
    """
    seldom_s = min(MOST_BEATS * faults.heartbeat_s, faults.heartbeat_timeout_s / LEAST_BEATS)
    return max(faults.heartbeat_s, min(MEMBER_S * num_members, seldom_s))
