"""The server that other people's loops talk to (`penstock serve`)."""

import hashlib
from dataclasses import dataclass, field

from penstock.conf.checks import at_least, check_bounds
from penstock.conf.errors import ConfigError
from penstock.conf.secret import Secret, reveal

HASH = "sha256:"
MOST_TENANTS = 256
"""Most tenants of a server: each has series of its own in Prometheus, which keeps them for weeks."""


@dataclass
class TenantConfig:
    """A tenant of the server: who has its key, and what they may use."""

    key: str = ""
    """API key of a client (its TINKER_API_KEY): env:NAME or file:PATH say where it stands, or it stands here. It begins
    with tml-, as the SDK asks for. Its hash, sha256:…, will do too. Only the hash is kept, and neither is shown."""
    max_adapters: int = 16
    """Training clients that may be open at the same time; the next one is refused."""
    tokens_per_minute: int = 0
    """Tokens a minute, trained and sampled ones; requests beyond them wait. 0: any number."""
    max_waiting: int = 16384
    """Requests that may wait or be under way; the next one is refused for now (429), and the SDK sends it again."""
    max_waiting_mib: int = 512
    """Bodies of these together, in MiB: a hundred of the largest that the SDK sends."""
    max_stored_gib: float = 256.0
    """Saved weights on the server's disk, in GiB; a save beyond them fails, and its error says what to delete. The
    default has room for a few hundred states of adapters of an 8B model. 0: any number, as without tenants."""
    share: float = 1.0
    """Share of ranks and engines while other tenants wait as well, in relation to their shares."""

    def __post_init__(self) -> None:
        if self.key and not isinstance(self.key, Secret):
            self.key = _hashed(Secret.read(self.key, "serve.tenants.NAME.key"))


@dataclass
class ServeConfig:
    """The server of `penstock serve`. A run (`penstock run`) does not read this section."""

    host: str = "127.0.0.1"
    """Interface. Any but loopback asks clients for a key."""
    port: int = 8430
    """Port. 0: any free one."""
    model_name: str = ""
    """Name that clients call the base model by. Empty: the name in model.path; any name is taken then, since there is
    one base model."""
    full: bool = False
    """Whether all weights are trained, by one client, in the place of adapters. The rank that a client asks for means
    nothing then. Its state passes through rank 0's host memory and a file, 12 bytes a weight: for models up to about a
    billion weights."""
    max_rank: int = 0
    """Largest rank of an adapter. Ranks and engines reserve room for it: smaller ones are padded with zeros. 0: 32, the
    SDK's default, in `penstock serve`; a run serves no adapters."""
    max_loaded: int = 16
    """Adapters that an engine keeps ready to sample from (vLLM's max_loras is at most this). The others are loaded
    again when they are asked for."""
    max_resident: int = 64
    """Adapters whose optimizer states the ranks keep in host memory. The one that has rested longest is moved to
    disk."""
    snapshot_every: int = 16
    """Requests of an adapter that are at most repeated after a death: after so many its state is written to disk."""
    keep_results: int = 1024
    """Results of each client that are kept for one that asks again. Older ones are gone."""
    keep_unnamed: int = 32
    """Unnamed sampler weights of each session that are kept on disk, the newest ones; older ones are deleted once no
    request waits for them. A loop makes one at every step, and samples from the newest few."""
    keep_sessions: int = 1024
    """Sessions of each tenant that the server remembers, ended ones too, with their results. It forgets the oldest
    beyond that, unless they have training clients or send heartbeats. 1024 are more than a tenant starts in weeks."""
    gap_s: float = 330.0
    """Time that later requests of a training client wait for one that has not come. They fail after it: the SDK sends
    a request again for 300 s."""
    max_sampling: int = 256
    """Requests for samples that engines have at the same time; the others wait, in a fair order."""
    poll_s: float = 30.0
    """Longest time that a request for a result is held before the client has to ask again. The SDK gives up after 45
    s."""
    session_timeout_s: float = 3600.0
    """Time without a heartbeat after which a client's unnamed sampler weights are deleted, and its adapters rest on
    disk."""
    max_body_mib: int = 32
    """Largest body of a request with data, in MiB, compressed or not: all others have at most 1 MiB. The SDK sends at
    most 5 MB of data at once, or one sequence."""
    drain_s: float = 6.0
    """Time for requests under way when the server is asked to end; the rest is carried out after its next start. By
    default the process ends within 15 s, before schedulers kill it."""
    max_adapters: int = 64
    """Training clients that may be open at the same time where there are no tenants; each tenant has its own bound."""
    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """Tenants by name: {alice: {key: "env:ALICE_KEY", max_adapters: 4}}. None: one, whose key is the server's own."""

    @property
    def slot_rank(self) -> int | None:
        """The largest rank of what ranks and engines take; 0: whole models; None: a run serves nothing."""
        return 0 if self.full else self.max_rank or None

    def __post_init__(self) -> None:
        check_bounds(
            self, "serve",
            max_rank=0, max_loaded=1, max_resident=1, snapshot_every=1, keep_results=1, keep_unnamed=1,
            keep_sessions=1, max_body_mib=1, max_sampling=1, max_adapters=1, drain_s=0, port=(0, 65535),
        )  # fmt: skip
        if self.full and self.max_rank:
            raise ConfigError(
                f"serve.max_rank={self.max_rank}: with serve.full=true there are no adapters. Leave one of them out."
            )
        for name in ("poll_s", "session_timeout_s", "gap_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"serve.{name}={getattr(self, name):g}: must be greater than 0.")
        if len(self.tenants) > MOST_TENANTS:
            raise ConfigError(
                f"serve.tenants: are {len(self.tenants)}, and a server has {MOST_TENANTS} at most. Start another one."
            )
        keys = [reveal(tenant.key) for tenant in self.tenants.values()]
        for name, tenant in self.tenants.items():
            if not tenant.key or keys.count(reveal(tenant.key)) > 1:
                raise ConfigError(f"serve.tenants.{name}.key: is missing, or another tenant's, too. Give it its own.")
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ConfigError(f"serve.tenants.{name}: a name has letters, digits, dashes and underscores alone.")
            if tenant.share <= 0:
                raise ConfigError(f"serve.tenants.{name}.share={tenant.share:g}: must be greater than 0.")
            at_least(f"serve.tenants.{name}.tokens_per_minute", tenant.tokens_per_minute, 0)
            at_least(f"serve.tenants.{name}.max_stored_gib", tenant.max_stored_gib, 0)
            for bound in ("max_adapters", "max_waiting", "max_waiting_mib"):
                at_least(f"serve.tenants.{name}.{bound}", getattr(tenant, bound), 1)


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return HASH + hashlib.sha256(key.encode()).hexdigest()


def _hashed(key: Secret) -> Secret:
    """A tenant's key, as its hash. Raises `ConfigError`."""
    value = str(reveal(key))
    if not value.startswith((HASH, "tml-")):
        raise ConfigError(f"serve.tenants.NAME.key={key}: a key begins with tml-. Name env:VARIABLE or file:PATH.")
    return Secret(value if value.startswith(HASH) else hash_of(value), str(key))
