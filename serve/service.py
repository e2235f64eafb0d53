"""The server without HTTP: requests of clients on a backend and a run directory.

endpoints ─▶ Service ─▶ Sessions          sessions, training clients, samplers
                     ─▶ TrainingClient    requests of an adapter ─▶ TrainingLoop
                     ─▶ Samples           requests for samples ─▶ SamplingQueue

DIRECTORY/sessions.journal, clients/ID/, samples/SESSION/, checkpoints/
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.conf.serve import ServeConfig
from penstock.metering import table
from penstock.serve.backend import Backend
from penstock.serve.journal import Entry, JournalDamaged, JournalError, RequestLog
from penstock.serve.samples import Samples
from penstock.serve.saved_weights import Checkpoints, NotFound, WeightsAddress
from penstock.serve.sessions import Busy, ClientFacts, ClientSession, Sessions
from penstock.serve.tenants import OPERATOR, Tenants
from penstock.serve.training_clients import TrainingClient, TrainingLoop
from penstock.workers.runtime.async_tasks import cancel_all

_LOG = logging.getLogger("penstock")
SILENT_S = 60.0
"""Seconds without a heartbeat after which a client of a whole model makes place for another; the SDK sends one every 10
s."""


class Refused(PenstockError):
    """An action that this tenant may not take."""


class Service:
    """Lifecycle: `open` on what the directory has; endpoints call the rest; `close`."""

    def __init__(self, config: ServeConfig, backend: Backend, directory: Path, tenants: Tenants) -> None:
        self.config, self.backend, self.directory, self.tenants = config, backend, directory, tenants
        self.checkpoints = Checkpoints(directory / "checkpoints")
        self.sessions = Sessions(directory, time.time(), config.keep_sessions)
        self.clients: dict[str, TrainingClient] = {}
        self.samples = Samples(config, backend, directory / "samples", tenants, self.sessions, self.checkpoints)
        self.ranks = TrainingLoop(backend, self.clients, config, tenants, self.checkpoints, self.samples, self.sessions)
        self._damaged: set[str] = set()
        """Training clients whose files cannot be read."""
        self._making = asyncio.Lock()
        self.is_ending = asyncio.Event()
        self.loops: list[asyncio.Task[None]] = []
        """Background tasks, training first. The server ends when one of them ends by itself."""

    async def open(self) -> None:
        """Continue where the directory's last server ended."""
        await self.samples.drop_unused_saves()
        for model_id in sorted(self.sessions.open_clients):
            try:
                self._open_client(self.sessions.facts[model_id])
            except JournalDamaged as error:
                _LOG.error("%s", error)
                self._damaged.add(model_id)
        for session in self.sessions.sessions.values():
            with contextlib.suppress(JournalDamaged):  # its requests hear of it
                self.samples.resume(session)
        loops = {"training": self.ranks.run(), "sampling": self.samples.queue.run()}
        loops |= {"engines": self.backend.run(), "tidying": self._watch()}
        self.loops = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]

    @property
    def trouble(self) -> str:
        """Reason why the server carries out nothing; empty if it does."""
        ended = [loop for loop in self.loops if loop.done() and not loop.cancelled()]
        faults = [f"{loop.get_name()} ended by a fault ({error})" for loop in ended if (error := loop.exception())]
        if faults:
            return f"{' and '.join(faults)}, and the server ends."
        return "the server is ending." if self.is_ending.is_set() else ""

    async def close(self) -> None:
        """End within `serve.drain_s`: requests under way are finished, what is left is in the journals."""
        self.is_ending.set()
        self.ranks.drain()
        drain_s = self.config.drain_s
        await asyncio.gather(self.samples.queue.close(drain_s), asyncio.wait(self.loops[:1], timeout=drain_s))
        if not self.loops[0].done():
            _LOG.warning("Not all adapters were written within serve.drain_s: the others are made of the journals.")
        await cancel_all(self.loops)
        for client in list(self.clients.values()):
            await client.close()
        await self.samples.close()
        await self.sessions.close()

    def client(self, tenant: str, model_id: str) -> TrainingClient:
        facts = self.sessions.run(tenant, model_id)
        client = self.clients.get(facts.model_id)
        if client is None and facts.model_id in self._damaged & self.sessions.open_clients:
            client = self._open_client(facts)
        if client is None:
            raise NotFound(f"training client {model_id} is over: make a new one, from a checkpoint.")
        return client

    async def create_client(self, facts: ClientFacts) -> TrainingClient:
        """Make a training client, unless it was made before. Raises `Refused` beyond the tenant's bound."""
        async with self._making:
            if (known := self.clients.get(facts.model_id)) is not None:
                return known
            bound = self.tenants.configs[facts.tenant].max_adapters
            num_open = sum(self.sessions.facts[one].tenant == facts.tenant for one in self.sessions.open_clients)
            if num_open >= bound:
                raise Refused(f"{num_open} training clients are open, and this key has {bound} (max_adapters). Finish "
                              "a session first: `with ServiceClient() as client`.")  # fmt: skip
            if self.backend.facts.is_whole:
                self._refuse_second(facts)
            await self.sessions.add_client(facts)
            return self._open_client(facts)

    def _refuse_second(self, facts: ClientFacts) -> None:
        """Raise `Refused` while another client trains all weights. One whose session has fallen silent has left: its
        weights rest on the disk, and come back with its next request."""
        silent = time.time() - SILENT_S
        there = {client.facts.session_id for client in self.clients.values()}
        if any(self.sessions.sessions[one].last_seen > silent for one in there):
            raise Refused(
                "serve.full: one client trains all weights at a time, and another one is there. End its session "
                f"(`with ServiceClient() as client`), or wait {SILENT_S:g} s after its last sign of life."
            )

    async def accept(self, client: TrainingClient, entry: Entry, body: bytes, identity: bytes = b"") -> Entry:
        """Take a request of a training client. Raises `Busy`, and `JournalError` while the server ends."""
        is_known = entry.seq in client.log.entries or entry.seq == client.next_seq  # which all others wait for
        self.admit(client.facts.session_id, 0 if is_known else len(body))
        entry = await client.accept(entry, body, identity)
        self.ranks.wake()
        return entry

    def admit(self, session_id: str, num_bytes: int) -> None:
        """Note that a session is alive. `num_bytes`: of a new request; 0: it is known. Raises `Busy` where its tenant
        has as much waiting as it may, and `JournalError` while the server ends."""
        if self.trouble:
            raise JournalError(f"{self.trouble} It takes no more requests: send this one again to the next server.")
        session = self.sessions.sessions[session_id]
        session.last_seen = time.time()
        bounds = self.tenants.configs[session.tenant]
        num, size = waiting(log for tenant, log in self.logs() if num_bytes and tenant == session.tenant)
        if num and (num >= bounds.max_waiting or size + num_bytes > bounds.max_waiting_mib * 2**20):
            raise Busy(f"{num} requests of this key wait or are under way, and it has {bounds.max_waiting} of "
                       f"{bounds.max_waiting_mib} MiB (max_waiting, max_waiting_mib). Send it again.")  # fmt: skip

    def logs(self) -> Iterator[tuple[str, RequestLog]]:
        """All requests that are open, each log with its tenant."""
        yield from ((client.facts.tenant, client.log) for client in self.clients.values())
        yield from ((self.sessions.sessions[name].tenant, log) for name, log in self.samples.logs.items())

    async def unload(self, client: TrainingClient) -> None:
        """End a training client, after the requests that have come. Raises `Refused` if they take too long."""
        try:
            async with asyncio.timeout(self.config.gap_s):
                while (entry := client.next) is not None:
                    await entry.is_done.wait()
        except TimeoutError:
            num = len(client.log.waiting)
            raise Refused(f"{client.facts.model_id} still has {num} requests: unload it later.") from None
        await self._drop_client(client.facts.model_id)

    async def finish(self, session: ClientSession) -> None:
        """End a session: its training clients, and its unnamed weights."""
        for model_id in session.clients:
            if model_id in self.clients:
                await self._drop_client(model_id)
        await self.samples.rest(session)
        paths = {sampler.path for sampler in session.samplers.values() if sampler.save}
        await self.sessions.finish(session)
        await self.samples.finish(session)
        for path in paths:
            await self.samples.drop_unused_saves(WeightsAddress.parse(path))

    def waits_for(self, client: TrainingClient, entry: Entry | None) -> str:
        """What a training client's request waits for, as half a sentence."""
        if self.trouble:
            return self.trouble
        if client.trouble:
            return f"the disk: {client.trouble}"
        if client.gap is not None:
            since = time.monotonic() - client.gap_since if client.gap_since is not None else 0.0
            return f"request {client.gap} has not come; given up in {max(0.0, self.config.gap_s - since):.0f} s"
        if self.ranks.current == client.facts.model_id:
            return f"request {client.next_seq} is being carried out"
        before = entry.seq - client.next_seq if entry is not None else 0
        return f"{before} requests before it, and {max(0, self.ranks.num_waiting - 1)} other adapters that wait"

    def _open_client(self, facts: ClientFacts) -> TrainingClient:
        directory = self.directory / "clients" / facts.model_id.replace(":", "_")
        client = TrainingClient(facts, directory, self.config.keep_results, self.backend.facts.max_rank)
        self.clients[facts.model_id] = client
        return client

    async def _drop_client(self, model_id: str) -> None:
        client = self.clients.pop(model_id)
        await self.sessions.drop_client(model_id)
        await self.ranks.drop(client)
        await client.close()
        await asyncio.to_thread(shutil.rmtree, client.log.directory, ignore_errors=True)

    async def _watch(self) -> None:
        period = max(0.05, min(10.0, self.config.session_timeout_s / 4))
        while True:
            await asyncio.sleep(period)
            try:
                await self.tidy()
            except (PenstockError, OSError) as error:
                _LOG.warning("%s", error)

    async def tidy(self) -> None:
        """Bring the adapters of sessions without a heartbeat to the disk, delete their unnamed weights, and checkpoints
        whose time is over."""
        for address in await asyncio.to_thread(self.checkpoints.expired):
            with contextlib.suppress(NotFound):  # its client was faster
                await self.delete_checkpoint(address)
        oldest = time.time() - self.config.session_timeout_s
        for session in list(self.sessions.sessions.values()):
            was_resting, session.is_resting = session.is_resting, session.last_seen < oldest
            if session.is_resting and not session.is_over:
                if not was_resting or session.id in self.samples.logs:
                    await self.samples.rest(session)
                for client in [self.clients[one] for one in session.clients if one in self.clients]:
                    if client.is_resident and client.next is None:
                        self.ranks.rest(client)
            await self.sessions.forget_deleted_samplers(session, self.config.keep_results)
        for session in self.sessions.sessions_to_forget(time.time() - SILENT_S):
            await self.finish(session)
            kept = [run for run in session.clients if await asyncio.to_thread(self.checkpoints.checkpoints_of, run)]
            await self.sessions.forget(session, kept)
        await self.sessions.compact()

    async def delete_checkpoint(self, address: WeightsAddress) -> None:
        """Delete a checkpoint here and on the engines. Raises `NotFound`."""
        await self.samples.publications.drop(await asyncio.to_thread(self.checkpoints.delete, address))
        await self.samples.drop_unused_saves(address)


def client_id(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


def status(service: Service, who: str) -> dict[str, Any]:
    """The state of the server as plain data: tenants, their training clients, and what each waits for. A tenant sees
    its own. Looks at each session and client once."""
    names = [name for name in service.tenants.configs if who in (OPERATOR, name)]
    sessions = _by_tenant((one.tenant, one) for one in service.sessions.sessions.values() if not one.is_over)
    runs = _by_tenant((run.tenant, run.model_id) for run in service.sessions.facts.values())
    clients = _by_tenant((client.facts.tenant, client) for client in service.clients.values())
    logs = _by_tenant(service.logs())
    for name in names:
        num_waiting, waiting_bytes = waiting(logs[name])
        stored = service.checkpoints.num_bytes(runs[name])
        num_resident = sum(client.is_resident for client in clients[name])
        for metric, value in {
            table.SERVE_WAITING: num_waiting, table.SERVE_WAITING_BYTES: waiting_bytes, table.SERVE_STORED: stored,
            table.SERVE_ADAPTERS: len(clients[name]), table.SERVE_RESIDENT: num_resident,
        }.items():  # fmt: skip
            service.tenants.meters.put(metric, value, tenant=name)
    facts, usage, now = service.backend.facts, service.tenants.usage(), time.time()
    return {
        "model": {"name": facts.name, "max_length": facts.max_length, "max_rank": facts.max_rank},
        "is_ending": service.is_ending.is_set(),
        "losses_of_ranks": service.ranks.num_losses,
        "tenants": {
            name: {
                "share": service.tenants.configs[name].share,
                "tokens_per_minute": service.tenants.configs[name].tokens_per_minute,
                "paused_s": service.samples.schedule.opens_in(name, time.monotonic()),
                "max_adapters": service.tenants.configs[name].max_adapters,
                "max_stored_gib": service.tenants.configs[name].max_stored_gib,
                "usage": usage[name],
                "sessions": [
                    {"id": one.id, "name": one.display_name, "silent_s": now - one.last_seen, "rests": one.is_resting}
                    for one in sessions[name]
                ],
                "clients": [_client(service, client) for client in clients[name]],
            }
            for name in names
        },
    }


def metrics(service: Service, who: str) -> str:
    """What each tenant has used and has under way, as Prometheus reads it; a tenant sees its own."""
    status(service, who)  # measures what there is now
    found: dict[str, list[str]] = {}
    for series, value in service.tenants.meters.read().items():
        if who in (OPERATOR, dict(series.labels)["tenant"]):
            shown = ",".join(f'{label}="{text}"' for label, text in series.labels)
            head = f"# TYPE {series.metric.name} {series.metric.kind}"
            found.setdefault(head, []).append(f"{series.name}{{{shown}}} {value}")
    return "".join(f"{line}\n" for head, lines in found.items() for line in (head, *lines))


def _client(service: Service, client: TrainingClient) -> dict[str, Any]:
    return {
        "id": client.facts.model_id,
        "session": client.facts.session_id,
        "base_model": client.facts.base_model,
        "rank": client.facts.rank,
        "next": client.next_seq,
        "waiting": len(client.log.waiting),
        "on_ranks": client.is_resident,
        "snapshot": client.snapshot_seq,
        "waits_for": service.waits_for(client, client.next) if client.log.waiting else "the client's next request",
    }


def waiting(logs: Iterable[RequestLog]) -> tuple[int, int]:
    """Number of requests without a result, and the bytes of their bodies."""
    sizes = [size for log in logs for size in log.waiting.values()]
    return len(sizes), sum(sizes)


def _by_tenant(values: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for tenant, value in values:
        found[tenant].append(value)
    return found
