"""The members of a fleet: by role and stage, those that start in place of others, and those that are gone."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

from penstock.conf.errors import DeadlineExceeded
from penstock.orchestrator.cluster.ownership.owners import Owner
from penstock.orchestrator.cluster.placement.actors import ActorPlan

Members = list[tuple[str, Any]]
"""Names and handles of actors."""
GANGS = ("trainer", "scorer")
"""Roles whose ranks meet: they start together, and one of them is worth nothing without the others."""
LOOK_S = 0.1
"""Seconds between two looks for a role that is empty."""


class Roster:
    """Members by the plan's names, which stay when another takes a member's place. Lifecycle: `starting` has members
    that begin; once they serve, `add` puts them into their role; `remove` ends them.
    """

    def __init__(self, plan: Collection[ActorPlan], patience_s: float, owner: Owner) -> None:
        """`patience_s`: longest wait for a role that is empty. `owner`: that of the actors."""
        self.owner = owner
        self.plan = list(plan)  # it changes, and a fleet after this one begins as this one did
        self.actors: dict[str, Any] = {}
        """Handles by name."""
        self.starting: dict[str, Any] = {}
        """Handles of actors that replace others and are not added yet, by name."""
        self.made: Counter[str] = Counter()
        """Number of actors made so far, by name."""
        self._patience_s = patience_s

    def teams(self, *roles: str) -> list[list[str]]:
        """Names of actors that start together: all ranks of a model, or one actor. All roles if none is named."""
        teams: dict[tuple[str, str], list[str]] = {}
        for actor in self.plan:
            if actor.name in self.made and (not roles or actor.role in roles):
                key = str(actor.stage) if actor.role in GANGS else actor.name
                teams.setdefault((actor.role, key), []).append(actor.name)
        return list(teams.values())

    def kill(self, names: Collection[str]) -> None:
        """End actors that are dead, or of no use. Their callers hear that they are gone."""
        for name in names:
            for members in (self.actors, self.starting):
                if name in members:
                    self.owner.end(members[name])

    def remove(self, names: Collection[str]) -> None:
        """End actors, and take them out of their role."""
        self.kill(names)
        for name in names:
            for members in (self.actors, self.starting):
                members.pop(name, None)

    def add(self, members: Members) -> None:
        """Put members into their role, in place of those before them."""
        for name, handle in members:
            self.actors[name] = handle
            self.starting.pop(name, None)

    def first_stage(self, role: str) -> str | None:
        """The first stage that has members of a role."""
        return next((actor.stage for actor in self.plan if actor.role == role), None)

    def role(self, role: str, stage: str | None = None) -> Members:
        """Names and handles of one role, and of one stage of it if one is named."""
        return [
            (actor.name, self.actors[actor.name])
            for actor in self.plan
            if actor.role == role and actor.name in self.actors and stage in (None, actor.stage)
        ]

    async def present(self, role: str, stage: str | None = None) -> Members:
        """Members of a role that is never empty for long: where all have died, waits for the first replacement. Raises
        `DeadlineExceeded`."""
        deadline = time.monotonic() + self._patience_s
        while not (members := self.role(role, stage)):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no {role} was there within {self._patience_s:g} s (rollout.start_timeout_s).")
            await asyncio.sleep(LOOK_S)
        return members

    def plan_of(self, name: str) -> ActorPlan:
        return next(actor for actor in self.plan if actor.name == name)
