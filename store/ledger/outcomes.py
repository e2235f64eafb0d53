"""Outcomes of groups: mean and spread of the rewards of a group's samples, which a curriculum goes by. Pure.

    write of rewards ─▶ note ─┐
    end of a group   ─▶ ended ┴─▶ of(group): its outcome, once each of its samples has a reward or has been dropped

The source asks for them (`workers/prompts/order.py`), also for those of long ago if it is another's successor.
"""

import math
from collections.abc import Mapping
from typing import Any

from penstock.store.ledger.group import Group, bits

Outcome = tuple[float, float]
"""Mean and standard deviation (that of the population) of a group's rewards."""
MOST_KNOWN = 65_536
"""The most groups whose outcomes are kept. A source that restarts further back does without the older ones."""


class Outcomes:
    """Outcomes by group. Lifecycle: `note` and `ended` at events of the ledger; then `of`, any number of times."""

    def __init__(self, size: int) -> None:
        """`size`: samples of a group."""
        self._size = size
        self._rewards: dict[int, list[float | None]] = {}
        """Rewards of the samples of groups that have not ended."""
        self._known: dict[int, Outcome] = {}
        """Outcomes of groups that have, the newest last."""

    def note(self, group: int, index: int, reward: float) -> None:
        """Note the reward of a sample. One that it had before stands."""
        rewards = self._rewards.setdefault(group, [None] * self._size)
        rewards[index] = reward if rewards[index] is None else rewards[index]

    def ended(self, group: int) -> None:
        """Note that a group has ended: no reward comes any more."""
        found = outcome_of(self._rewards.pop(group, ()))
        if found is not None:
            self._known[group] = found
            while len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]

    def of(self, group: int, resident: Group | None) -> Outcome | None:
        """The outcome of a group; None if no sample of it had a reward. `resident`: the group, unless it has ended.
        Raises `LookupError` while a living sample has none."""
        if resident is None:
            return self._known.get(group)
        rewards = self._rewards.get(group, [None] * self._size)
        if any(rewards[index] is None for index in bits(resident.live)):
            raise LookupError(f"group {group} has samples without a reward")
        return outcome_of(rewards)

    def as_values(self, first: int) -> dict[str, Any]:
        """Plain data for a snapshot. `first`: the oldest group that a resumed source asks for."""
        return {
            "rewards": {str(group): rewards[:] for group, rewards in self._rewards.items()},
            "known": {str(group): list(outcome) for group, outcome in self._known.items() if group >= first},
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        self._rewards = {int(group): list(rewards) for group, rewards in values["rewards"].items()}
        self._known = {int(group): (mean, spread) for group, (mean, spread) in values["known"].items()}


def outcome_of(rewards: "list[float | None] | tuple[()]") -> Outcome | None:
    """Mean and standard deviation of the rewards that are not None; None without any. The same bits on any machine."""
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / len(known))
