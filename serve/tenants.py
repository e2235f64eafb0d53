"""Who may use the server, and what each has used.

A key is kept as its hash. Without tenants in the configuration there is one, whose key is the server's.
"""

import asyncio
import logging
import secrets
import time
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.conf.secret import reveal
from penstock.conf.serve import ServeConfig, TenantConfig, hash_of
from penstock.metering import table
from penstock.metering.meters import COUNTER, Meters
from penstock.serve.request_log import Entry
from penstock.serve.schedule import Budget

ONLY = "default"
"""Name of the tenant of a server whose configuration has none."""
MOST_PLAIN, MOST_BODIES = 256, 16
OPERATOR = ""
"""Who sees all tenants and trains nothing."""


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

    def who(self, key: str) -> str | None:
        """The tenant that has a key; `OPERATOR`; None: nobody."""
        return self._keys.get(hash_of(key))

    def note(self, tenant: str, entry: Entry, seconds: float, tokens: int) -> None:
        """Count a request that was carried out in this time."""
        is_sample, meters = entry.kind == "sample", self.meters
        meters.add(table.SERVE_REQUESTS, tenant=tenant, kind=entry.kind)
        meters.add(table.SERVE_FAILURES, entry.is_failure, tenant=tenant)
        meters.add(table.SERVE_ENGINES if is_sample else table.SERVE_RANKS, seconds, tenant=tenant)
        meters.add(table.SERVE_SAMPLED if is_sample else table.SERVE_TRAINED, tokens, tenant=tenant)
        waited = max(0.0, time.monotonic() - seconds - entry.came)
        meters.observe(table.SERVE_WAIT, waited, tenant=tenant, place="engines" if is_sample else "ranks")

    def usage(self, tenant: str) -> dict[str, Any]:
        """What is measured of a tenant, by metric and, where it has one more label, by that."""
        found: dict[str, Any] = {}
        for series, value in self.meters.read().items():
            labels, name = dict(series.labels), series.name.removeprefix("penstock_serve_").removesuffix("_total")
            if labels.pop("tenant") == tenant:
                for label in labels.values():
                    found.setdefault(name, {})[label] = value
                if not labels:
                    found[name] = value
        return found

    def refuse(self, tenant: str, why: str, until: float) -> None:
        """Refuse the requests of a tenant until that time."""
        logging.getLogger("penstock").warning("%s is refused: %s", tenant, why)
        self._refused[tenant] = (why, until)

    def refusal(self, tenant: str, now: float) -> str:
        """Why requests of a tenant are refused; empty: they are not."""
        why, until = self._refused.get(tenant, ("", 0.0))
        if now >= until:
            return ""
        return (
            f"{why}. All its requests are refused for {until - now:.0f} s: ask for less at a time after that, such as "
            "fewer and shorter sequences. Adapters stay as they were."
        )
