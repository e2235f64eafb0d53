"""Scaling of a run: who has members join and leave.

ScalingListener      `penstock scale`, by the mailbox of the agent on the driver's node (`scaling_requests.py`)
AutoscalerFollower   `rollout.num_workers=auto`: engines join when the cluster has room for more, which it is asked for
ScalableRole         `session.rollouts` and `session.rewards`, in a user's own loop
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayError

from penstock.conf.errors import CannotScale, PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.capacity import Capacity
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.control.members import Membership, drain
from penstock.orchestrator.control.scaling_requests import MET_AT_START, ScalingRequest, change_of, who_leaves
from penstock.orchestrator.recovery.restart import CatchUp

FOLLOW_S = 5.0
"""Seconds between two looks for room on the cluster: nodes come and go by minutes, and a look costs milliseconds."""
LONGEST_S = 300.0
"""Longest pause in seconds after engines that did not start: what keeps them from it is not gone soon."""


class ScalingListener:
    """The controller's listener for requests from outside, which it grants one after the other. Lifecycle: `run` until
    it is cancelled."""

    def __init__(self, agent: Any, members: Membership, config: RunConfig) -> None:
        """`agent`: the handle of the agent on the driver's node."""
        self._agent, self._members, self._config = agent, members, config

    async def run(self) -> None:
        with contextlib.suppress(RayError):  # the agent is lost, which its watcher reports
            while True:
                number, (texts, drain_s) = await self._agent.take_question.remote()
                await self._agent.answer.remote(number, await self._answer(texts, drain_s))

    async def _answer(self, texts: list[str], drain_s: float | None) -> dict[str, Any]:
        """The answer to requests, as plain data, since it goes through the agent."""
        try:
            requests = [ScalingRequest.of(text) for text in texts]
            if self._config.rollout.follows_cluster and any(request.role == "rollout" for request in requests):
                raise CannotScale(
                    "rollout: there are as many engines as the cluster has room for (rollout.num_workers=auto). Add or "
                    "remove nodes, or start the run with a number."
                )
            done = await self._members.change(requests, drain_s)
        except CannotScale as error:
            return {"refused": str(error), "done": [], "problems": []}
        problems = [problem for one in done for problem in one.problems]
        return {"refused": "", "done": [str(one) for one in done], "problems": problems}


class AutoscalerFollower:
    """The follower of the cluster's size, which looks every few seconds whether there is room for more engines, and
    asks for it while they are too few. Nodes that leave take their engines with them (`members.py`); engines are added
    here when there is room again, or for the first time. Lifecycle: `run` until it is cancelled."""

    def __init__(
        self,
        capacity: Capacity,
        members: Membership,
        config: RunConfig,
        metrics: Callable[[], Mapping[str, Any]],
        note: Callable[[str], None],
    ) -> None:
        """`metrics`: those of the last step. `note`: shows a line to people."""
        self._capacity, self._members, self._config = capacity, members, config
        self._metrics, self._note = metrics, note

    async def run(self) -> None:
        pause_s = FOLLOW_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                wanted = await asyncio.to_thread(self._capacity.num_engines_more)
                came = 0
                if wanted:
                    (done,) = await self._members.change([ScalingRequest("rollout", wanted, is_change=True)])
                    came = len(done.joined)
                await self._ask()
                pause_s = next_look_s(pause_s, wanted, came)
        finally:
            self._capacity.ask_for_engines(0)

    async def _ask(self) -> None:
        present = self._members.num_present("rollout")
        lacking = engines_lacking(self._metrics(), present, self._config, is_asking=self._capacity.is_asking)
        if await asyncio.to_thread(self._capacity.ask_for_engines, lacking):
            self._note(f"ranks wait for samples: asks the cluster for room for {lacking} more engine(s)")


def engines_lacking(metrics: Mapping[str, Any], present: int, config: RunConfig, *, is_asking: bool) -> int:
    """Number of further engines to ask the cluster for: up to `rollout.max_workers` while the ranks wait for samples
    and the engines are busy. A run that asks already stops only when the ranks wait half as long, so that steps that
    differ a little change nothing. `metrics`: those of the last step."""
    share, max_workers = config.diagnosis.idle_share, config.rollout.max_workers
    engines_wait = config.max_staleness > 0 and (metrics.get("idle/rollout") or 0.0) > share
    ranks_wait = (metrics.get("idle/train") or 0.0) > (share / 2 if is_asking else share)
    return max(0, config.max_engines - present) if max_workers and ranks_wait and not engines_wait else 0


def next_look_s(pause_s: float, wanted: int, came: int) -> float:
    """Seconds to wait until the next look: more each time that none of the wanted engines came.

    >>> next_look_s(5.0, 2, 0), next_look_s(40.0, 2, 1), next_look_s(200.0, 1, 0)
    (10.0, 5.0, 300.0)
    """
    return min(2 * pause_s, LONGEST_S) if wanted and not came else FOLLOW_S


class ScalableRole:
    """The members of one role, whose number a user's loop changes.

    session.rollouts.add(2)                    # returns once they serve the newest weights
    session.rollouts.remove(1, drain_s=30.0)   # the last that came
    """

    def __init__(self, role: str, fleet: Fleet, config: RunConfig, catch_up: CatchUp | None) -> None:
        """`catch_up`: what new members do before they serve; None: there can be none."""
        self._role, self._fleet, self._config, self._catch_up = role, fleet, config, catch_up

    def __len__(self) -> int:
        return len(self._names)

    async def add_members(self, count: int) -> list[str]:
        """Add members. Returns their names. Raises `CannotScale`, `ResourceError`, and what one of them failed with;
        then none was added."""
        self._check(count, is_more=True)
        assert self._catch_up is not None
        names: list[str] = []
        try:
            for _ in range(count):
                names.append(await self._fleet.capacity.enlarge(self._role, self._fleet.first_stage(self._role)))
            teams = await asyncio.gather(*(self._fleet.start_members([name]) for name in names))
            members = [member for team in teams for member in team]
            await self._catch_up(members)
        except PenstockError:
            for name in names:
                await self._fleet.end(*self._fleet.take_out(name))
            raise
        self._fleet.add(members)
        return names

    async def remove_members(self, count: int, drain_s: float | None) -> list[str]:
        """Remove the members that came last. Returns their names. Raises `CannotScale`."""
        self._check(-count, is_more=False)
        drain_s = self._config.rollout.drain_s if drain_s is None else drain_s
        leaving = who_leaves(self._names, count)
        members = [(name, handle) for name, handle in self._fleet.role(self._role) if name in leaving]
        taken = [self._fleet.take_out(name) for name in leaving]
        await drain(members, drain_s)
        await asyncio.gather(*(self._fleet.end(*one) for one in taken))
        return leaving

    @property
    def _names(self) -> list[str]:
        stage = self._fleet.first_stage(self._role)
        return [actor.name for actor in self._fleet.plan if (actor.role, actor.stage) == (self._role, stage)]

    def _check(self, change: int, *, is_more: bool) -> None:
        if (is_more and change < 1) or (not is_more and change > -1):
            raise CannotScale(f"{self._role}: {abs(change)} is no number of members to add or remove.")
        refusals = {self._role: MET_AT_START} if self._catch_up is None else {}
        change_of(ScalingRequest(self._role, change, is_change=True), len(self), refusals)
