"""The tenants of a server: who has which key, what each has used, and whose request is carried out next.

A key is kept as its hash. Without tenants in the configuration there is one, whose key is the server's.

Tenants are served in the order of their virtual times: the tokens that were carried out for each, divided by its share
(start-time fair queueing, Goyal et al. 1996). A tenant that rested begins where the others are, so it saves nothing up.
Requests of one adapter stay together up to `MOST_TOGETHER`, since adapters are exchanged on the ranks. A tenant beyond
its tokens a minute waits until they have come back. Time is an argument.
"""

import asyncio
import logging
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import ConfigError, PenstockError
from penstock.conf.secret import reveal
from penstock.conf.serve import ServeConfig, TenantConfig, hash_of
from penstock.metering import table
from penstock.metering.meters import COUNTER, Meters
from penstock.serve.journal import Entry

ONLY = "default"
"""Name of the tenant of a server whose configuration has none."""
MOST_PLAIN, MOST_BODIES = 256, 16
OPERATOR = ""
"""Name of the operator, who sees all tenants and trains nothing."""
MOST_TOGETHER = 8
"""Requests of one adapter that are carried out one after the other while others wait."""


class Tenants:
    """Lifecycle: made of the configuration."""

    def __init__(self, config: ServeConfig, key: str = "", known: str = "", meters: Meters | None = None) -> None:
        """`key`: of the only tenant, or of the operator where there are tenants. Empty: the one whose hash is
        `known`, or a new one. `meters`: take what is measured of tenants."""
        if key and not key.startswith("tml-"):
            raise ConfigError("the server's key: must begin with tml-, as the SDK asks for.")
        self.configs = dict(config.tenants) or {ONLY: TenantConfig(max_adapters=config.max_adapters, max_stored_gib=0)}
        self.key = key if key or known else f"tml-{secrets.token_urlsafe(24)}"
        """Key of the operator, or of the only tenant. Empty: it was printed at an earlier start."""
        self._keys = {reveal(tenant.key): name for name, tenant in config.tenants.items()}
        if (own := hash_of(self.key) if self.key else known) in self._keys:
            raise ConfigError(f"the operator's key: is that of serve.tenants.{self._keys[own]}; give it another one.")
        self._keys[own] = OPERATOR if config.tenants else ONLY
        self.shares = {name: one.share for name, one in self.configs.items()}
        self.budgets = {name: Budget(one.tokens_per_minute) for name, one in self.configs.items()}
        self.meters = meters or Meters()
        for name in self.configs:
            for metric in table.METRICS["serve"]:
                if metric.kind == COUNTER and metric.labels == ("tenant",):
                    self.meters.add(metric, 0, tenant=name)
        self.bodies = {name: (asyncio.Semaphore(MOST_PLAIN), asyncio.Semaphore(MOST_BODIES)) for name in self.configs}
        """Bodies without data that are read at the same time, and those with data that are read and decoded."""
        self._refused: dict[str, tuple[str, float]] = {}

    def tenant_of(self, key: str) -> str | None:
        """The tenant that has a key; `OPERATOR`; None: nobody."""
        return self._keys.get(hash_of(key))

    def holder(self, head: bytes) -> str:
        """The tenant whose connection begins with this head; empty: nobody's."""
        found = re.search(rb"(?im)^(?:x-api-key:|authorization:\s*bearer\s)\s*(\S+)", head)
        return self.tenant_of(found[1].decode("latin-1")) or "" if found is not None else ""

    def count_request(self, tenant: str, entry: Entry, seconds: float, num_sampled: int = 0) -> None:
        """Count a request that was carried out in this time. `num_sampled`: tokens of samples."""
        is_sample, meters = entry.kind == "sample", self.meters
        tokens = num_sampled if is_sample else entry.tokens * entry.kind.startswith("forward")
        meters.add(table.SERVE_REQUESTS, tenant=tenant, kind=entry.kind)
        meters.add(table.SERVE_FAILURES, entry.is_failure, tenant=tenant)
        meters.add(table.SERVE_ENGINES if is_sample else table.SERVE_RANKS, seconds, tenant=tenant)
        meters.add(table.SERVE_SAMPLED if is_sample else table.SERVE_TRAINED, tokens, tenant=tenant)
        waited = max(0.0, time.monotonic() - seconds - entry.came)
        meters.observe(table.SERVE_WAIT, waited, tenant=tenant, place="engines" if is_sample else "ranks")

    def usage(self) -> dict[str, dict[str, Any]]:
        """What is measured of each tenant, by metric and, where it has one more label, by that."""
        found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for series, value in self.meters.read().items():
            labels, name = dict(series.labels), series.name.removeprefix("penstock_serve_").removesuffix("_total")
            own = found[labels.pop("tenant")]
            for label in labels.values():
                own.setdefault(name, {})[label] = value
            if not labels:
                own[name] = value
        return found

    def refuse(self, tenant: str, why: PenstockError, now: float, seconds: float) -> str:
        """Refuse the requests of a tenant for this time. Returns `refusal`."""
        logging.getLogger("penstock").warning("%s is refused: %s", tenant, why)
        self._refused[tenant] = (str(why), now + seconds)
        return self.refusal(tenant, now)

    def refusal(self, tenant: str, now: float) -> str:
        """Why requests of a tenant are refused; empty: they are not."""
        why, until = self._refused.get(tenant, ("", 0.0))
        if now >= until:
            return ""
        return (
            f"{why}. All its requests are refused for {until - now:.0f} s: ask for less at a time after that, such as "
            "fewer and shorter sequences. Adapters stay as they were."
        )


@dataclass(frozen=True)
class NextRequest:
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
    chosen = schedule.pick([NextRequest("a:0", "alice", 300), NextRequest("b:0", "bob", 300)], now)
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

    def pick(self, waiting: Sequence[NextRequest], now: float) -> NextRequest | None:
        """The next one, which counts as carried out from here on; None: all wait for their tokens a minute."""
        tenants = frozenset(one.tenant for one in waiting)
        for tenant in tenants - self._active:
            self._times[tenant] = max(self._times.get(tenant, 0.0), self._now)
        self._active = tenants
        allowed = [one for one in waiting if self.opens_in(one.tenant, now) == 0]
        if not allowed:
            return None
        same = [one for one in allowed if one.queue == self._last and self._together < MOST_TOGETHER]
        chosen = min(
            same or allowed,
            key=lambda one: (self._times[one.tenant], one.tenant, self._turns.get(one.queue, 0), one.queue),
        )
        self._count(chosen, now)
        return chosen

    def opens_in(self, tenant: str, now: float) -> float:
        """Seconds until a tenant's tokens have come back; 0: it has some."""
        budget = self._budgets.get(tenant)
        return budget.opens_in(now) if budget is not None else 0.0

    def forget(self, queue: str) -> None:
        """Forget a queue that will not be seen again."""
        self._turns.pop(queue, None)

    def _count(self, chosen: NextRequest, now: float) -> None:
        self._together = self._together + 1 if chosen.queue == self._last else 1
        self._last, self._turn = chosen.queue, self._turn + 1
        self._turns[chosen.queue] = self._turn
        self._now = max(self._now, self._times[chosen.tenant])
        self._times[chosen.tenant] += max(1, chosen.tokens) / self._shares.get(chosen.tenant, 1.0)
        if chosen.tenant in self._budgets:
            self._budgets[chosen.tenant].spend(chosen.tokens, now)
