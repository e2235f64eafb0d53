"""Who may use the server, and what each has used.

A key is looked up in constant time. Without tenants in the configuration there is one, whose key is the server's; on
loopback it may have none, and then any key will do.
"""

import hmac
import secrets
from collections import Counter
from dataclasses import dataclass, field

from penstock.conf.errors import ConfigError
from penstock.conf.serve import ServeConfig, TenantConfig
from penstock.orchestrator.serve.schedule import Budget

ONLY = "default"
"""Name of the tenant of a server whose configuration has none."""
OPERATOR = ""
"""Who sees all tenants and trains nothing."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


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

    def __init__(self, config: ServeConfig, key: str = "") -> None:
        """`key`: of the only tenant, or of the operator where there are tenants. Empty: none on loopback without
        tenants, a new one elsewhere."""
        if key and not key.startswith("tml-"):
            raise ConfigError("--key: must begin with tml-, as the SDK asks for.")
        self.configs = dict(config.tenants) or {ONLY: TenantConfig(max_adapters=config.max_adapters)}
        if not key and (config.tenants or config.host not in LOOPBACK):
            key = f"tml-{secrets.token_urlsafe(24)}"
        self.key = key
        """Key of the operator, or of the only tenant. Empty: any key will do."""
        self._keys = {tenant.key: name for name, tenant in config.tenants.items()}
        if key in self._keys:
            raise ConfigError(f"--key: is that of serve.tenants.{self._keys[key]}; the operator's is another one.")
        if key:
            self._keys[key] = OPERATOR if config.tenants else ONLY
        self.shares = {name: one.share for name, one in self.configs.items()}
        self.budgets = {name: Budget(one.tokens_per_minute) for name, one in self.configs.items()}
        self.usage = {name: Usage() for name in self.configs}

    def who(self, key: str) -> str | None:
        """The tenant that has a key; `OPERATOR`; None: nobody."""
        if not self._keys:
            return ONLY
        given, found = key.encode(), None
        for known, name in self._keys.items():
            if hmac.compare_digest(given, known.encode()):
                found = name
        return found
