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
from penstock.orchestrator.serve.schedule import Budget, Limits

ONLY = "default"
"""Name of the tenant of a server whose configuration has none."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAMES = ("requests", "failures", "tokens_trained", "tokens_sampled", "seconds_trained", "seconds_sampled")


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


@dataclass(frozen=True)
class Visitor:
    """Who has sent a request. `tenant`: empty for the operator, who sees all and trains nothing."""

    tenant: str

    @property
    def is_operator(self) -> bool:
        return not self.tenant


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
            self._keys[key] = "" if config.tenants else ONLY
        self.limits = {name: Limits(one.share, one.tokens_per_minute) for name, one in self.configs.items()}
        self.budgets = {name: Budget(one.tokens_per_minute) for name, one in self.configs.items()}
        self.usage = {name: Usage() for name in self.configs}

    def visitor(self, key: str | None) -> Visitor | None:
        """Who has a key; None: nobody."""
        if not self._keys:
            return Visitor(ONLY)
        given, found = (key or "").encode(), None
        for known, name in self._keys.items():
            if hmac.compare_digest(given, known.encode()):
                found = Visitor(name)
        return found

    def metrics(self, visitor: Visitor, gauges: dict[str, dict[str, float]]) -> str:
        """What was used, as Prometheus reads it; a tenant sees its own. `gauges`: more of each tenant, by name."""
        names = [name for name in self.configs if visitor.is_operator or visitor.tenant == name]
        lines: list[str] = []

        def write(metric: str, kind: str, values: list[tuple[str, float]]) -> None:
            lines.append(f"# TYPE penstock_serve_{metric} {kind}")
            lines.extend(f"penstock_serve_{metric}{{{labels}}} {value:g}" for labels, value in values)

        usage = {name: self.usage[name] for name in names}
        write("requests_total", "counter", [
            (f'tenant="{name}",kind="{kind}"', count)
            for name, used in usage.items() for kind, count in sorted(used.requests.items())
        ])  # fmt: skip
        for metric in _NAMES[1:]:
            write(f"{metric}_total", "counter", [(_label(name), getattr(used, metric)) for name, used in usage.items()])
        for metric in sorted({metric for of_one in gauges.values() for metric in of_one}):
            write(metric, "gauge", [(_label(name), gauges.get(name, {}).get(metric, 0)) for name in names])
        return "\n".join(lines) + "\n"


def _label(tenant: str) -> str:
    return f'tenant="{tenant}"'
