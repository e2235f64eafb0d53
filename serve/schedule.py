"""Whose request is carried out next. Pure: time is an argument.

Tenants are served in the order of their virtual times: the tokens that were carried out for each, divided by its share
(start-time fair queueing, Goyal et al. 1996). A tenant that rested begins where the others are, so it saves nothing up.
Requests of one adapter stay together up to `MOST_TOGETHER`, since adapters are exchanged on the ranks. A tenant beyond
its tokens a minute waits until they have come back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_TOGETHER = 8
"""Requests of one adapter that are carried out one after the other while others wait."""


@dataclass(frozen=True)
class Waiting:
    """The next request of a queue: an adapter, or a sampling session."""

    queue: str
    tenant: str
    tokens: int


class Budget:
    """The tokens of a tenant that come back with time: at most those of a minute, below zero after a request that was
    larger. It may start a request as long as there are any."""

    def __init__(self, tokens_per_minute: int) -> None:
        self._rate = tokens_per_minute / 60
        self._tokens, self._at = float(tokens_per_minute), -math.inf

    def spend(self, tokens: float, now: float) -> None:
        self._refill(now)
        self._tokens -= tokens

    def opens_in(self, now: float) -> float:
        """Seconds until the next request may start; 0: now."""
        if not self._rate:
            return 0.0
        self._refill(now)
        return 0.0 if self._tokens > 0 else (1 - self._tokens) / self._rate

    def _refill(self, now: float) -> None:
        since = 0.0 if self._at == -math.inf else max(0.0, now - self._at)
        self._tokens, self._at = min(self._rate * 60, self._tokens + since * self._rate), now


class Schedule:
    """Lifecycle: `pick` the next of all that wait, again and again.

    schedule = Schedule({"alice": 2.0}, budgets)
    chosen = schedule.pick([Waiting("a:0", "alice", 300), Waiting("b:0", "bob", 300)], now)
    """

    def __init__(self, shares: dict[str, float], budgets: dict[str, Budget]) -> None:
        """By tenant, where they are not 1 or any number. `budgets`: may be shared with another schedule."""
        self._shares, self._budgets = shares, budgets
        self._times: dict[str, float] = {}
        self._now = 0.0
        """Virtual time at which the request that was picked last has started."""
        self._active: frozenset[str] = frozenset()
        self._last, self._together = "", 0
        self._turns: dict[str, int] = {}
        self._turn = 0

    def pick(self, waiting: Sequence[Waiting], now: float) -> Waiting | None:
        """The next one, which counts as carried out from here on; None: all wait for their tokens a minute."""
        tenants = frozenset(one.tenant for one in waiting)
        for tenant in tenants - self._active:
            self._times[tenant] = max(self._times.get(tenant, 0.0), self._now)
        self._active = tenants
        allowed = [one for one in waiting if self.opens_in(one.tenant, now) == 0]
        if not allowed:
            return None
        chosen = self._continued(allowed) or min(allowed, key=self._order)
        self._count(chosen, now)
        return chosen

    def opens_in(self, tenant: str, now: float) -> float:
        """Seconds until a tenant's tokens have come back; 0: it has some."""
        budget = self._budgets.get(tenant)
        return budget.opens_in(now) if budget is not None else 0.0

    def forget(self, queue: str) -> None:
        """Forget a queue that will not be seen again."""
        self._turns.pop(queue, None)

    def _continued(self, allowed: Sequence[Waiting]) -> Waiting | None:
        if self._together >= MOST_TOGETHER:
            return None
        return next((one for one in allowed if one.queue == self._last), None)

    def _order(self, one: Waiting) -> tuple[float, str, int, str]:
        return self._times[one.tenant], one.tenant, self._turns.get(one.queue, 0), one.queue

    def _count(self, chosen: Waiting, now: float) -> None:
        self._together = self._together + 1 if chosen.queue == self._last else 1
        self._last, self._turn = chosen.queue, self._turn + 1
        self._turns[chosen.queue] = self._turn
        self._now = max(self._now, self._times[chosen.tenant])
        self._times[chosen.tenant] += max(1, chosen.tokens) / self._shares.get(chosen.tenant, 1.0)
        if chosen.tenant in self._budgets:
            self._budgets[chosen.tenant].spend(chosen.tokens, now)
