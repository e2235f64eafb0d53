"""`session.rollouts` and `session.rewards`: more or fewer of them, in a user's own loop."""

import asyncio

from penstock.conf.errors import CannotScale, PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.membership.draining import drain
from penstock.orchestrator.membership.supervisor import CatchUp
from penstock.orchestrator.membership.wishes import MET_AT_START, Wish, change_of, who_leaves


class ByHand:
    """The members of one role.

    session.rollouts.add(2)                    # returns once they serve the newest weights
    session.rollouts.remove(1, drain_s=30.0)   # the last that came
    """

    def __init__(self, role: str, fleet: Fleet, config: RunConfig, catch_up: CatchUp | None) -> None:
        """`catch_up`: what new members do before they serve; None: there can be none."""
        self._role, self._fleet, self._config, self._catch_up = role, fleet, config, catch_up

    def __len__(self) -> int:
        return len(self._names)

    async def added(self, count: int) -> list[str]:
        """Add members. Returns their names. Raises `CannotScale`, `ResourceError`, and what one of them failed with;
        then none was added."""
        self._check(count, is_more=True)
        assert self._catch_up is not None
        names: list[str] = []
        try:
            for _ in range(count):
                names.append(await self._fleet.growth.enlarge(self._role, self._fleet.first_stage(self._role)))
            teams = await asyncio.gather(*(self._fleet.replace([name]) for name in names))
            members = [member for team in teams for member in team]
            await self._catch_up(members)
        except PenstockError:
            for name in names:
                await self._fleet.end(*self._fleet.take_out(name))
            raise
        self._fleet.add(members)
        return names

    async def removed(self, count: int, drain_s: float | None) -> list[str]:
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
        change_of(Wish(self._role, change, is_change=True), len(self), refusals)
