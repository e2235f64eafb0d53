"""Who may use the server, and what each has used.

A key is kept as its hash. Without tenants in the configuration there is one, whose key is the server's.
"""

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass, field

from penstock.conf.errors import ConfigError
from penstock.conf.secret import reveal
from penstock.conf.serve import ServeConfig, TenantConfig, hash_of
from penstock.orchestrator.serve.schedule import Budget

ONLY = "default"
"""Name of the tenant of a server whose configuration has none."""
MOST_BODIES = 16
OPERATOR = ""
"""Who sees all tenants and trains nothing."""


@dataclass
class Usage:
    """What a tenant has used since the server started."""

    requests: Counter[str] = field(default_factory=Counter)
    """Requests that were carried out, by kind."""
    failures: int = 0
    tokens_trained: int = 0
    tokens_sampled: int = 0
    seconds_trained: float = 0.0
    """Seconds on the ranks."""
    seconds_sampled: float = 0.0
    """Seconds on engines; those of requests at the same time add up."""


class Tenants:
    """Lifecycle: made of the configuration."""

    def __init__(self, config: ServeConfig, key: str = "", known: str = "") -> None:
        """`key`: of the only tenant, or of the operator where there are tenants. Empty: the one whose hash is
        `known`, or a new one."""
        if key and not key.startswith("tml-"):
            raise ConfigError("the server's key: must begin with tml-, as the SDK asks for.")
        self.configs = dict(config.tenants) or {ONLY: TenantConfig(max_adapters=config.max_adapters)}
        self.key = key if key or known else f"tml-{secrets.token_urlsafe(24)}"
        """Key of the operator, or of the only tenant. Empty: it was printed at an earlier start."""
        self._keys = {reveal(tenant.key): name for name, tenant in config.tenants.items()}
        if (own := hash_of(self.key) if self.key else known) in self._keys:
            raise ConfigError(f"the operator's key: is that of serve.tenants.{self._keys[own]}; give it another one.")
        self._keys[own] = OPERATOR if config.tenants else ONLY
        self.shares = {name: one.share for name, one in self.configs.items()}
        self.budgets = {name: Budget(one.tokens_per_minute) for name, one in self.configs.items()}
        self.usage = {name: Usage() for name in self.configs}
        self.bodies = {name: asyncio.Semaphore(MOST_BODIES) for name in self.configs}
        """Bodies with data that are read and decoded at the same time."""
        self._refused: dict[str, tuple[str, float]] = {}

    def who(self, key: str) -> str | None:
        """The tenant that has a key; `OPERATOR`; None: nobody."""
        return self._keys.get(hash_of(key))

    def refuse(self, tenant: str, why: str, until: float) -> None:
        """Refuse the requests of a tenant until that time."""
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
