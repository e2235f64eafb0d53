"""The table of a fleet's members: what each is planned as, and which actors it has had. Names stay when another actor
takes a member's place.

    planned ─▶ starting ─▶ serving ◀─▶ lent
                  ▲           │  └───▶ left
                  └── lost ◀──┘

It changes on the event loop alone, once the run has begun. Where a member is, and what is reserved for it, is in
`placement/reservation.py`, by the same names.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.conf.errors import DeadlineExceeded
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.ray_calls import Handles

GANGS = ("trainer", "scorer")
"""Roles whose ranks meet: they start together, and none is of use alone."""
LOOK_S = 0.1
"""Seconds between two looks for a role that is empty."""


@dataclass
class Member:
    """A line of the table."""

    plan: ActorPlan
    incarnation: int = 0
    """Number of actors made for the member so far."""
    handle: Any = None
    """The actor that serves in its role; None: none does."""
    starting: Any = None
    """The actor that is to serve in its role; None: none starts."""
    is_lent: bool = False
    """True while the actor works for another caller than its role."""
    num_loans: int = 0
    """Number of times that the member was lent so far."""
    is_reserved: bool = False
    """True if whoever takes its place is lent from its start on."""
    has_left: bool = False
    """True once the member is no part of the plan any more. Its name does not come again."""

    @property
    def handles(self) -> list[Any]:
        """Its actors, the one that starts, too."""
        return [handle for handle in (self.handle, self.starting) if handle is not None]


class MemberTable:
    """Members by name.

    Lifecycle: `enter` a member, and `begin` with an actor; once that serves, `add` it to its role, and `remove` it when
    it is lost; `lend` it, and `take_back`, any number of times; `take_out` a member that leaves."""

    def __init__(self, plan: Collection[ActorPlan], patience_s: float, owner: Owner) -> None:
        """`patience_s`: longest wait for a role that is empty. `owner`: that of the actors."""
        self.owner = owner
        self._members = {actor.name: Member(actor) for actor in plan}
        self._patience_s = patience_s

    @property
    def plan(self) -> list[ActorPlan]:
        """The plans of all members that have not left."""
        return [member.plan for member in self._present()]

    @property
    def actors(self) -> dict[str, Any]:
        """Handles of the actors that serve, by name."""
        return {member.plan.name: member.handle for member in self._present() if member.handle is not None}

    def handle_of(self, name: str) -> Any:
        """The handle of the actor that serves as a member; None: none does."""
        member = self._members.get(name)
        return member.handle if member is not None else None

    @property
    def names_made(self) -> list[str]:
        """Names that actors ever had, also of members that have left."""
        return [name for name, member in self._members.items() if member.incarnation]

    def enter(self, actor: ActorPlan) -> None:
        """Plan one more member."""
        self._members[actor.name] = Member(actor)

    def lines(self) -> list[Member]:
        """The lines of the table without their handles, for another process."""
        return [replace(member, handle=None, starting=None) for member in self._members.values()]

    def adopt(self, lines: Iterable[Member], handles: Mapping[str, Any]) -> None:
        """Take the table of another process. `handles`: those of the actors that serve, by name."""
        self._members = {line.plan.name: replace(line, handle=handles.get(line.plan.name)) for line in lines}

    def begin(self, members: Handles) -> None:
        """Note actors that are to take the places of members."""
        for name, handle in members:
            self._members[name].starting = handle

    def next_incarnation(self, name: str) -> int:
        """Count one more actor of a member."""
        self._members[name].incarnation += 1
        return self._members[name].incarnation

    def take_out(self, name: str) -> tuple[ActorPlan, Any]:
        """Take a member that has left out of its role. Returns its plan and its handle, for its end. None: it was
        dead."""
        member = self._members[name]
        handle = member.handle if member.handle is not None else member.starting
        if member.incarnation:
            member.handle, member.starting, member.is_lent, member.has_left = None, None, False, True
        else:
            del self._members[name]
        return member.plan, handle

    def teams(self, *roles: str) -> list[list[str]]:
        """Names of actors that start together: all ranks of a model, or one actor. All roles if none is named."""
        teams: dict[tuple[str, str], list[str]] = {}
        for member in self._present():
            actor = member.plan
            if member.incarnation and (not roles or actor.role in roles):
                key = str(actor.stage) if actor.role in GANGS else actor.name
                teams.setdefault((actor.role, key), []).append(actor.name)
        return list(teams.values())

    def kill(self, names: Collection[str]) -> None:
        """End actors that are dead, or of no use. Their callers hear that they are gone."""
        for name in names:
            if (member := self._members.get(name)) is not None:
                for handle in member.handles:
                    self.owner.end(handle)

    def remove(self, names: Collection[str]) -> None:
        """End actors, and take them out of their role."""
        self.kill(names)
        for name in names:
            if (member := self._members.get(name)) is not None:
                member.handle = member.starting = None
                member.is_lent = False

    def lend(self, names: Collection[str]) -> None:
        """Take members out of their role, whose actors stay."""
        for name in names:
            self._members[name].is_lent = True
            self._members[name].num_loans += 1

    def reserve(self, names: Collection[str]) -> None:
        """Lend from their start on those that take the places of members."""
        for name in names:
            self._members[name].is_reserved = True

    def take_back(self, names: Collection[str]) -> None:
        """Put lent members into their role again."""
        for name in names:
            self._members[name].is_lent = False

    def is_lent(self, name: str) -> bool:
        """Return whether a member is lent, and its actor is there."""
        return name in dict(self.lent())

    def num_loans(self, name: str) -> int:
        """Number of times that a member was lent so far."""
        member = self._members.get(name)
        return member.num_loans if member is not None else 0

    def lent(self) -> Handles:
        """Names and handles of the members that are lent."""
        return [(one.plan.name, one.handle) for one in self._present() if one.is_lent and one.handle is not None]

    def add(self, members: Handles) -> None:
        """Put actors into their role, in place of those before them; those of reserved members are lent."""
        for name, handle in members:
            member = self._members[name]
            member.handle, member.starting, member.is_lent = handle, None, member.is_reserved

    def all_handles(self) -> list[Any]:
        """Handles of all actors, those that start too."""
        return [handle for member in self._members.values() for handle in member.handles]

    def clear(self) -> None:
        """Forget all actors: they have ended, or are another process's."""
        for member in self._members.values():
            member.handle = member.starting = None

    def first_stage(self, role: str) -> str | None:
        """The first stage that has members of a role."""
        return next((actor.stage for actor in self.plan if actor.role == role), None)

    def role(self, role: str, stage: str | None = None) -> Handles:
        """Names and handles of one role, and of one stage of it if one is named. Members that are lent are not in
        it."""
        serving = (member for member in self._present() if member.handle is not None and not member.is_lent)
        return [
            (member.plan.name, member.handle)
            for member in serving
            if member.plan.role == role and stage in (None, member.plan.stage)
        ]

    async def present(self, role: str, stage: str | None = None) -> Handles:
        """Members of a role that is never empty for long: where all have died, waits for the first replacement. Raises
        `DeadlineExceeded`."""
        deadline = time.monotonic() + self._patience_s
        while not (members := self.role(role, stage)):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no {role} was there within {self._patience_s:g} s (rollout.start_timeout_s).")
            await asyncio.sleep(LOOK_S)
        return members

    def plan_of(self, name: str) -> ActorPlan:
        return self._members[name].plan

    def _present(self) -> Iterator[Member]:
        return (member for member in self._members.values() if not member.has_left)
