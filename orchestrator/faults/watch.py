"""Watches the members of a run: who does not answer, or is stuck, is ended, and with that as lost as if it had died.

    every faults.heartbeat_s: progress of every member ─▶ liveness.py ─ silent or stuck ─▶ its stacks into the run's
                                                                                          directory ─▶ SIGKILL

Whoever waits for the member hears of its death, and `supervisor.py` or `trainer_recovery.py` has another take its
place. Used by `controller.py`.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.faults.liveness import Liveness, State, Verdict
from penstock.orchestrator.fleet import Fleet
from penstock.orchestrator.ray_calls import answer, outcomes
from penstock.orchestrator.recording.run_directory import RunDirectory
from penstock.workers.processes import ProcessId
from penstock.workers.progress import Progress

ROLES = ("rollout", "reward", "compute", "prompts", "scorer", "trainer")
STACKS_S = 60.0
"""For an agent to read stacks, and for one to end a process."""


@dataclass
class _Watched:
    """One incarnation of a member."""

    handle: Any
    role: str
    liveness: Liveness
    process: ProcessId | None = None
    """None until it has said so: one that never does is ended by Ray."""


class Watch:
    """Lifecycle: `run` until it is cancelled."""

    def __init__(self, fleet: Fleet, config: RunConfig, directory: RunDirectory) -> None:
        self._fleet, self._config, self._directory = fleet, config, directory
        self._watched: dict[str, _Watched] = {}

    async def run(self) -> None:
        beat_s = self._config.faults.heartbeat_s
        while True:
            began = time.monotonic()
            self._look_around()
            await self._ask(beat_s)
            for name, watched in list(self._watched.items()):
                verdict = watched.liveness.judge(time.monotonic())
                if verdict.state is not State.ALIVE:
                    del self._watched[name]
                    if self._fleet.actors.get(name) is not watched.handle:
                        continue  # it has left meanwhile
                    await self._end(name, watched, verdict)
            await asyncio.sleep(max(0.0, began + beat_s - time.monotonic()))

    def _look_around(self) -> None:
        """Who is there now: those that have come anew are watched anew."""
        there = {name: (handle, role) for role in ROLES for name, handle in self._fleet.role(role)}
        for name in list(self._watched):
            if name not in there or there[name][0] is not self._watched[name].handle:
                del self._watched[name]
        for name, (handle, role) in there.items():
            if name not in self._watched:
                self._watched[name] = _Watched(handle, role, Liveness(role, self._config, time.monotonic()))

    async def _ask(self, timeout_s: float) -> None:
        """Everybody at once. Who does not answer in time is asked again."""
        members = list(self._watched.items())
        unknown = [(name, watched) for name, watched in members if watched.process is None]
        calls = [(name, watched.handle.process.remote(self._fleet.stacks_root)) for name, watched in unknown]
        calls += [(name, watched.handle.progress.remote()) for name, watched in members]
        answers = await outcomes(calls, phase="heartbeat", timeout_s=timeout_s)
        for (_, watched), process in zip(unknown, answers, strict=False):
            watched.process = process if isinstance(process, ProcessId) else None
        for (_, watched), progress in zip(members, answers[len(unknown) :], strict=True):
            if isinstance(progress, Progress):
                watched.liveness.heard(time.monotonic(), progress)

    async def _end(self, name: str, watched: _Watched, verdict: Verdict) -> None:
        agent, stacks = self._fleet.agent_of(name), "it has not said which process it is"
        if watched.process is not None:
            stacks = await self._told(agent, "dump_stacks", watched.process, name)
        file = self._directory.write_stacks(name, stacks)
        about = {"role": watched.role, "member": name, "state": verdict.state.value, "reason": verdict.reason}
        self._directory.event("ended", **about, stacks=file)
        if watched.process is not None:
            await self._told(agent, "kill", watched.process)
        self._fleet.kill(name, watched.handle)

    async def _told(self, agent: tuple[str, Any], method: str, *arguments: Any) -> str:
        """What the agent of a node says; or why it says nothing."""
        name, handle = agent
        try:
            call = getattr(handle, method).remote(*arguments)
            return str(await answer(call, name=name, phase=method, timeout_s=STACKS_S))
        except PenstockError as error:
            return str(error)
