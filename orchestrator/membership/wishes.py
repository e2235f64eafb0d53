"""Wishes of people: more or fewer members of a role. Pure: what a wish means for the present members, why it cannot be
granted, and how its result is told.

    rollout=+2   two more       rollout=3   three in all       reward=-1   one less, of each reward stage
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.conf.errors import CannotScale, suggest

ROLES = ("rollout", "reward")
"""Roles that may have more members, and fewer."""
MET_AT_START = (
    "engines and the trainer's ranks met at the start, as they share devices (placement=colocated) or stream weights "
    "(weights.transport). Start with another rollout.num_workers."
)
"""Reason why there can be no more of a role, and no fewer."""
PATTERN = re.compile(r"(?P<role>[a-z]+)=(?P<sign>[+-]?)(?P<number>\d+)")


@dataclass(frozen=True)
class Wish:
    """A wish for `number` members in all, or for so many more than there are."""

    role: str
    number: int
    is_change: bool = False

    @classmethod
    def of(cls, text: str) -> "Wish":
        """Parse a wish as it is typed. Raises `CannotScale`."""
        found = PATTERN.fullmatch(text)
        if found is None:
            raise CannotScale(f"{text}: no wish. Write rollout=+2 for two more, rollout=-1 for one less, rollout=3.")
        role, sign, number = found["role"], found["sign"], int(found["number"])
        if role not in ROLES:
            raise CannotScale(f"{text}: no role that may change while a run goes on{suggest(role, ROLES)}")
        return cls(role, -number if sign == "-" else number, bool(sign))

    def __str__(self) -> str:
        return f"{self.role}={self.number:{'+' if self.is_change else ''}d}"


def change_of(wish: Wish, num_present: int, refusals: Mapping[str, str]) -> int:
    """Number of members to add, negative to remove. `refusals`: reasons for roles that cannot change. Raises
    `CannotScale`."""
    if wish.role in refusals:
        raise CannotScale(f"{wish}: {refusals[wish.role]}")
    change = wish.number if wish.is_change else wish.number - num_present
    if num_present + change < 1:
        raise CannotScale(f"{wish}: {num_present} there now, and one has to stay. To end the run, interrupt it.")
    return change


def who_leaves(names: Sequence[str], count: int) -> list[str]:
    """The last members that came: what the others reserve stays the run's. `names`: in the order in which they came."""
    return list(reversed(names[len(names) - count :]))


@dataclass
class Done:
    """The result of a wish."""

    role: str
    before: int
    after: int = 0
    joined: list[str] = field(default_factory=list)
    """Members that joined, with their nodes: `Rollout-1 on node-2`."""
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Reasons why not all that was asked for was done."""

    def __str__(self) -> str:
        """The result as text.

        >>> str(Done("rollout", 1, 3, ["Rollout-1 on node-2", "Rollout-2 on node-1"]))
        'rollout: 1 -> 3 (Rollout-1 on node-2, Rollout-2 on node-1)'
        """
        moved = [*self.joined, *(f"{name} has left" for name in self.left)]
        return f"{self.role}: {self.before} -> {self.after}" + (f" ({', '.join(moved)})" if moved else "")
