"""Sessions, training clients and sampling sessions of each tenant, as a journal of events.

    sessions.journal     session, client, sampler, joined, gone, dropped, finished, forgotten

Of each tenant the newest sessions are known, and training runs as long as they have checkpoints or a session. What is
forgotten leaves the journal when that has doubled.
Ids are made of counters, so that a creation that is repeated finds what it made the first time. A session is alive
while it has heartbeats; time is an argument.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError, PenstockError
from penstock.serve.journal import Gone, Header, Journal, WrongNumber
from penstock.serve.saved_weights import NotFound

LARGE_BYTES = 2**20
FORMAT = 2
"""Number of the format of a server's directory. The one before has none in its events."""


class Busy(PenstockError):
    """A request of a tenant that has as much waiting or open as it may."""


@dataclass(frozen=True)
class ClientFacts:
    """What a training client is made with."""

    model_id: str
    session_id: str
    tenant: str
    base_model: str
    created: float
    metadata: dict[str, Any] | None = None
    rank: int | None = None
    """Rank of the adapter; None: all weights are trained, or the version before has made it."""


@dataclass
class Sampler:
    """A sampling session: weights, and who samples from them."""

    id: str
    session_id: str
    path: str
    """tinker:// path of a checkpoint; empty: the session's own weights, or the base model."""
    is_own: bool
    """Whether it has unnamed weights, which go with the session."""
    save: str = ""
    """Save that the path stood for when it was made."""
    is_gone: bool = False
    """Whether these are known to be deleted."""
    num_joined: int = 0
    origin: str = ""
    """Where its weights come from, in counters that do not change when the SDK repeats itself: its seeds are made of
    it. The SDK counts sampling sessions anew at every retry."""

    @property
    def number(self) -> int:
        """Its number in its session."""
        return int(self.id.rpartition(":")[2])

    @property
    def count(self) -> int:
        """How many of the same name there were before it in its session."""
        return int(self.origin.rpartition("/")[2])

    def has_same_weights(self, other: "Sampler") -> bool:
        """Return whether another one asks for the same weights. A name may stand for a newer save meanwhile."""
        return (self.path, self.is_own) == (other.path, other.is_own) and other.origin in ("", self.origin)


@dataclass
class ClientSession:
    id: str
    tenant: str
    created: float
    key: str = ""
    """Idempotency key that it was made with."""
    metadata: dict[str, Any] | None = None
    display_name: str | None = None
    is_over: bool = False
    last_seen: float = 0.0
    is_resting: bool = False
    """Whether it has had no heartbeat for so long that its weights were brought to the disk."""
    clients: list[str] = field(default_factory=list)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class Sessions:
    """Lifecycle: made for a run directory, new or left by another server; `close`. A change is on the disk when its
    call returns."""

    def __init__(self, directory: Path, now: float, keep: int) -> None:
        """`keep`: sessions of each tenant to remember, besides live ones. Raises `JournalError`, `ConfigError`."""
        self._journal, self._keep = Journal(directory / "sessions.journal", LARGE_BYTES), keep
        self.sessions: dict[str, ClientSession] = {}
        self.facts: dict[str, ClientFacts] = {}
        """All training clients, by id: the training runs."""
        self.open_clients: set[str] = set()
        self.uses: Counter[str] = Counter()
        """Number of sampling sessions that use each save."""
        self._by_key: dict[tuple[str, str], str] = {}
        self._making = asyncio.Lock()
        for record in self._journal.records:
            if record.header.get("format", 1) > FORMAT:
                raise ConfigError(
                    f"{directory}: a newer version of Penstock wrote it, in format {record.header['format']}; this one "
                    f"reads up to {FORMAT}. Install that version, or serve under another name=."
                )
            self._apply(record.header)
        for session in self.sessions.values():
            session.last_seen = now

    async def create(
        self, tenant: str, key: str, now: float, metadata: Any = None, name: str | None = None
    ) -> ClientSession:
        """Make a session, or find the one that was made with this idempotency key."""
        async with self._making:
            if key and (known := self._by_key.get((tenant, key))) is not None:
                return self.sessions[known]
            num = sum(session.tenant == tenant for session in self.sessions.values())
            if num >= 2 * self._keep:
                raise Busy(f"this key has {num} sessions, twice serve.keep_sessions. Finish some (`with ServiceClient()"
                           " as client`). Those without a sign of life are forgotten after a minute.")  # fmt: skip
            session_id = str(uuid.uuid4())
            await self._record({
                "event": "session", "id": session_id, "tenant": tenant, "created": now, "key": key,
                "metadata": metadata, "display_name": name,
            })  # fmt: skip
            self.sessions[session_id].last_seen = now
            return self.sessions[session_id]

    def session(self, tenant: str, session_id: str) -> ClientSession:
        found = self.sessions.get(session_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"session {session_id!r}: there is no such session.")
        return found

    def active_session(self, tenant: str, session_id: str) -> ClientSession:
        """A session that is not finished. Raises `NotFound`, `Gone`."""
        found = self.session(tenant, session_id)
        if found.is_over:
            raise Gone(f"session {session_id} is finished: make a new ServiceClient.")
        return found

    async def add_client(self, facts: ClientFacts) -> None:
        """Add a training client, unless it was added before."""
        async with self._making:
            if facts.model_id not in self.facts:
                await self._record({"event": "client", **asdict(facts)})

    def run(self, tenant: str, model_id: str) -> ClientFacts:
        """A training run of a tenant's. Raises `NotFound`."""
        found = self.facts.get(model_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"training run {model_id!r}: there is no such run.")
        return found

    def runs(self, tenant: str) -> list[ClientFacts]:
        """Training runs of a tenant, newest first."""
        mine = [facts for facts in self.facts.values() if facts.tenant == tenant]
        return sorted(mine, key=lambda facts: (-facts.created, facts.model_id))

    async def add_sampler(self, sampler: Sampler) -> Sampler:
        """Add a sampling session, unless it was added before. From the call on its save is in use. Raises
        `WrongNumber` if it was of other weights."""
        self.uses[sampler.save] += 1
        try:
            async with self._making:
                samplers = self.sessions[sampler.session_id].samplers
                known = samplers.get(sampler.id)
                if known is not None and not known.has_same_weights(sampler):
                    raise WrongNumber(f"{sampler.id} was made before, of other weights.")
                if known is None:
                    same = [one.count for one in samplers.values() if (one.path, one.is_own) == (sampler.path, False)]
                    count = max(same, default=-1) + 1  # those before may be forgotten
                    sampler.origin = sampler.origin or f"{sampler.path.partition(':train:')[2]}/{count}"
                    await self._record({"event": "sampler", **asdict(sampler)})
                return samplers[sampler.id]
        finally:
            self.uses[sampler.save] -= 1

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        session = self.sessions.get(sampler_id.partition(":")[0])
        found = session.samplers.get(sampler_id) if session is not None and session.tenant == tenant else None
        if found is None:
            raise NotFound(f"sampling session {sampler_id!r}: there is no such session.")
        return found

    async def join(self, sampler: Sampler) -> int:
        """The number of one more client of a sampling session; the first has 0."""
        async with self._making:
            number = sampler.num_joined + 1
            await self._record(
                {"event": "joined", "session_id": sampler.session_id, "id": sampler.id, "number": number}
            )
            return number

    async def drop_client(self, model_id: str) -> None:
        if model_id in self.open_clients:
            await self._record({"event": "dropped", "model_id": model_id})

    async def finish(self, session: ClientSession) -> None:
        if not session.is_over:
            await self._record({"event": "finished", "id": session.id})

    def sessions_to_forget(self, silent_since: float) -> list[ClientSession]:
        """Sessions beyond `keep` of each tenant that may be forgotten: finished ones, then those without a training
        client, the longest silent first."""
        found, num = [], Counter(session.tenant for session in self.sessions.values())
        for session in sorted(self.sessions.values(), key=lambda one: (not one.is_over, one.last_seen, one.created)):
            is_idle = session.last_seen < silent_since and self.open_clients.isdisjoint(session.clients)
            if num[session.tenant] > self._keep and (session.is_over or is_idle):
                found.append(session)
                num[session.tenant] -= 1
        return found

    async def forget(self, session: ClientSession, runs: Collection[str]) -> None:
        """Forget a session that is finished, and its training runs but these."""
        await self._record({"event": "forgotten", "id": session.id, "runs": list(runs)})

    async def forget_deleted_samplers(self, session: ClientSession, keep: int) -> None:
        """Forget sampling sessions whose weights are deleted, but for the newest of all."""
        if gone := [sampler.id for sampler in list(session.samplers.values())[:-keep] if sampler.is_gone]:
            await self._record({"event": "gone", "session_id": session.id, "ids": gone})

    async def compact(self) -> None:
        """Drop what is forgotten from the journal, if that has doubled since. Raises `JournalError`."""
        async with self._making:  # what is written and not yet known would be dropped
            if self._journal.is_large:
                await self._journal.rewrite(self._is_needed)

    async def close(self) -> None:
        await self._journal.close()

    def _is_needed(self, event: Header) -> bool:
        """Return whether a start needs an event."""
        match event["event"]:
            case "client" | "dropped":
                return event["model_id"] in self.facts
            case "sampler" | "joined":
                session = self.sessions.get(event["session_id"])
                return session is not None and event["id"] in session.samplers
            case "session" | "finished":
                return event["id"] in self.sessions
        return False

    async def _record(self, event: Header) -> None:
        await self._journal.append({**event, "format": FORMAT})
        self._apply(event)

    def _apply(self, event: Header) -> None:
        values = {name: value for name, value in event.items() if name not in ("event", "format")}
        session = self.sessions.get(values.get("session_id", values.get("id", "")))
        match event["event"]:
            case "session":
                made = self.sessions[values["id"]] = ClientSession(**values)
                if made.key:
                    self._by_key[made.tenant, made.key] = made.id
            case "client":
                facts = self.facts[values["model_id"]] = ClientFacts(**values)
                if session is not None:
                    session.clients.append(facts.model_id)
                    self.open_clients.add(facts.model_id)
            case "dropped":
                self.open_clients.discard(values["model_id"])
        if session is None:  # forgotten meanwhile
            return
        match event["event"]:
            case "sampler":
                sampler = session.samplers[values["id"]] = Sampler(**values)
                self.uses[sampler.save] += 1
            case "joined":
                if values["id"] in session.samplers:
                    session.samplers[values["id"]].num_joined = values["number"]
            case "gone":
                for sampler_id in values["ids"]:
                    session.samplers.pop(sampler_id, None)
            case "finished":
                session.is_over = True
                self.open_clients.difference_update(session.clients)
                self.uses.subtract(sampler.save for sampler in session.samplers.values())
                session.samplers.clear()
            case "forgotten":
                del self.sessions[session.id]
                self._by_key.pop((session.tenant, session.key), None)
                for run in set(session.clients) - set(values["runs"]):
                    del self.facts[run]
