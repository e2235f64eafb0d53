"""The server without HTTP: what requests of clients come to, on a backend and a run directory.

endpoints ─▶ Service ─▶ Sessions          who there is
                     ─▶ TrainingClient    requests of an adapter ─▶ Ranks
                     ─▶ RequestLog        requests for samples ─▶ SamplingQueue

DIRECTORY/sessions.journal, clients/ID/, samples/SESSION/, checkpoints/
"""

import asyncio
import contextlib
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path

from penstock.conf.errors import DataError, PenstockError
from penstock.conf.serve import ServeConfig
from penstock.orchestrator.loops.verbs import seed_of
from penstock.orchestrator.serve.backend import Backend, SampleOutput
from penstock.orchestrator.serve.checkpoints import Address, Checkpoints, NoCheckpoint
from penstock.orchestrator.serve.journal import JournalError
from penstock.orchestrator.serve.publications import Publications
from penstock.orchestrator.serve.ranks import Ranks
from penstock.orchestrator.serve.request_log import Asked, Entry, RequestLog
from penstock.orchestrator.serve.sampling_queue import SamplingQueue, Ticket
from penstock.orchestrator.serve.schedule import Schedule
from penstock.orchestrator.serve.sessions import NotFound, Sampler, Session, Sessions
from penstock.orchestrator.serve.state_file import write_state
from penstock.orchestrator.serve.tenants import Tenants
from penstock.orchestrator.serve.training_client import ClientFacts, TrainingClient
from penstock.orchestrator.serve.training_work import TrainingWork
from penstock.orchestrator.serve.wire.sampling import SampleRequest, sample_request
from penstock.orchestrator.serve.wire.training import ForwardCall
from penstock.workers.concurrent_tasks import cancel_all
from penstock.workers.gateway.http.fields import parsed
from penstock.workers.training_calls import AdapterState

_LOG = logging.getLogger("penstock")
SILENT_S = 60.0
"""Seconds without a heartbeat after which a client of a whole model makes place for another; the SDK sends one every 10
s."""
SEQ_BITS = 2**64
"""Numbers of requests in one sampling session, of all its clients."""


class Refused(PenstockError):
    """Something that is not done for this tenant."""


class Service:
    """Lifecycle: `open` on what the directory has; endpoints call the rest; `close`."""

    def __init__(self, config: ServeConfig, backend: Backend, directory: Path, tenants: Tenants) -> None:
        self.config, self.backend, self.directory, self.tenants = config, backend, directory, tenants
        self.checkpoints = Checkpoints(directory / "checkpoints")
        self.sessions = Sessions(directory, time.time())
        self.clients: dict[str, TrainingClient] = {}
        self.samples: dict[str, RequestLog] = {}
        """Requests for samples, by session."""
        self.publications = Publications(backend, 2 * config.max_loaded)
        work = TrainingWork(backend, self.checkpoints, self._add_own_sampler, self.owns)
        schedule = Schedule(tenants.limits, tenants.budgets)
        self.ranks = Ranks(backend, self.clients, schedule, config, work, self._note_training)
        self.sampling_schedule = Schedule(tenants.limits, tenants.budgets)
        self.queue = SamplingQueue(
            backend, self.publications, self.sampling_schedule, config.max_sampling, self._note_sampling
        )
        self.is_ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Go on where the directory's last server ended."""
        for model_id in sorted(self.sessions.open_clients):
            self._open_client(self.sessions.facts[model_id])
        for session in self.sessions.sessions.values():
            if not session.is_over and self._samples_of(session.id).exists():
                self._open_samples(session)
        self._tasks = [asyncio.create_task(one) for one in (self.ranks.run(), self.queue.run(), self._watch())]

    async def close(self) -> None:
        """End within `serve.drain_s`: requests under way are finished, what is left is in the journals."""
        self.is_ending.set()
        self.ranks.drain()
        ending = time.monotonic() + self.config.drain_s
        await asyncio.gather(
            self.queue.close(self.config.drain_s), asyncio.wait(self._tasks[:1], timeout=self.config.drain_s)
        )
        if self._tasks and self._tasks[0].done():
            try:
                async with asyncio.timeout(max(1.0, ending - time.monotonic())):
                    await self.ranks.keep_all()
            except TimeoutError:
                _LOG.warning("Not all adapters were written within serve.drain_s: the others are made of the journals.")
        await cancel_all(self._tasks)
        for client in self.clients.values():
            await client.close()
        for log in self.samples.values():
            await log.close()
        await self.sessions.close()

    def owns(self, tenant: str, run: str) -> bool:
        """Whether a training run is a tenant's."""
        facts = self.sessions.facts.get(run)
        return facts is not None and facts.tenant == tenant

    def client(self, tenant: str, model_id: str) -> TrainingClient:
        facts = self.sessions.run(tenant, model_id)
        client = self.clients.get(facts.model_id)
        if client is None:
            raise NotFound(f"training client {model_id} is over: make a new one, from a checkpoint.")
        return client

    async def create_client(self, facts: ClientFacts) -> TrainingClient:
        """Make a training client, unless it was made before. Raises `Refused` beyond the tenant's bound."""
        known = self.clients.get(facts.model_id)
        if known is not None:
            return known
        bound = self.tenants.configs[facts.tenant].max_adapters
        num_open = sum(client.facts.tenant == facts.tenant for client in self.clients.values())
        if num_open >= bound:
            raise Refused(f"{num_open} training clients are open, and this key has {bound} (max_adapters). Finish a "
                          "session first: `with ServiceClient() as client`.")  # fmt: skip
        if self.backend.facts.is_whole:
            self._refuse_second(facts)
        await self.sessions.add_client(facts)
        return self.clients.get(facts.model_id) or self._open_client(facts)

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

    async def accept(self, client: TrainingClient, asked: Asked, call: object) -> Entry:
        """Take a request of a training client. Raises `JournalError` while the server ends."""
        self._refuse_at_end()
        self._touch(client.facts.session_id)
        tokens = call.num_tokens if isinstance(call, ForwardCall) else 1
        entry = await client.accept(replace(asked, tokens=tokens), call)  # type: ignore[arg-type]
        self.ranks.wake()
        return entry

    async def unload(self, client: TrainingClient) -> None:
        """End a training client, after the requests that have come. Raises `Refused` if they take too long."""
        try:
            async with asyncio.timeout(self.config.gap_s):
                while (entry := client.next) is not None:
                    await entry.is_done.wait()
        except TimeoutError:
            raise Refused(
                f"{client.facts.model_id} still has {client.num_waiting} requests: unload it later."
            ) from None
        await self._drop_client(client.facts.model_id)

    async def finish(self, session: Session) -> None:
        """End a session: its training clients, and its unnamed weights."""
        for model_id in session.clients:
            if model_id in self.clients:
                await self._drop_client(model_id)
        await self._drop_own_weights(session)
        await self.sessions.finish(session)
        log = self.samples.pop(session.id, None)
        if log is not None:
            await log.close()
        await asyncio.to_thread(shutil.rmtree, self._samples_of(session.id), ignore_errors=True)

    async def take_sample(self, sampler: Sampler, seq: int, asked: Asked, request: SampleRequest | None) -> Entry:
        """Take a request for samples. `request`: None: it will be refused in its turn. Raises `JournalError` while the
        server ends."""
        self._refuse_at_end()
        self._touch(sampler.session_id)
        session = self.sessions.sessions[sampler.session_id]
        log = self.samples.get(session.id) or self._open_samples(session)
        number = number_of(sampler, seq)
        is_known = number in log.entries
        tokens = request.num_tokens if request is not None else 1
        entry = await log.accept(replace(asked, seq=number, tokens=tokens))
        if not is_known:
            self.queue.put(self._ticket(session, sampler, log, entry))
            if log.is_large:
                await log.drop_bodies(lambda _: False)
        return entry

    def file_of(self, sampler: Sampler) -> Path | None:
        """File of a sampling session's weights; None: the base model. Raises `DataError` if they are gone."""
        if sampler.is_own:
            file = self._own_file(sampler)
            if not file.exists():
                raise DataError(f"the unnamed weights of {sampler.id} are deleted: they go with their session, which "
                                f"keeps the newest {self.config.keep_unnamed} (serve.keep_unnamed). Save them under a "
                                "name to keep them.")  # fmt: skip
            return file
        if not sampler.path:
            return None
        address = Address.parse(sampler.path)
        self.checkpoints.get(address)
        return self.checkpoints.file(address)

    def waits_for(self, client: TrainingClient, entry: Entry | None) -> str:
        """What a training client's request waits for, as half a sentence."""
        if client.gap is not None:
            since = time.monotonic() - client.gap_since if client.gap_since is not None else 0.0
            return f"request {client.gap} has not come; given up in {max(0.0, self.config.gap_s - since):.0f} s"
        if self.ranks.current == client.facts.model_id:
            return f"request {client.next_seq} is being carried out"
        before = entry.seq - client.next_seq if entry is not None else 0
        others = sum(one.next is not None for one in self.clients.values()) - 1
        return f"{before} requests before it, and {max(0, others)} other adapters that wait"

    def decoded_sample(self, body: bytes, sampler: Sampler, seq: int) -> SampleRequest:
        """Decode a request. Raises `BadRequest`."""
        seed = seed_of("sample", sampler.origin, seq)
        return sample_request(parsed(body), self.backend.facts.max_length, seed)

    def _refuse_at_end(self) -> None:
        if self.is_ending.is_set():
            raise JournalError("the server is ending, and takes no more requests. Send it again to the next one.")

    def _ticket(self, session: Session, sampler: Sampler, log: RequestLog, entry: Entry) -> Ticket:
        seq = entry.seq % SEQ_BITS

        def request() -> SampleRequest:
            return self.decoded_sample(log.body_of(entry), sampler, seq)

        return Ticket(session.tenant, sampler.id, log, entry, request, lambda: self.file_of(sampler))

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

    def _open_samples(self, session: Session) -> RequestLog:
        log = self.samples[session.id] = RequestLog(self._samples_of(session.id), self.config.keep_results)
        by_number = {int(name.rpartition(":")[2]): one for name, one in session.samplers.items()}
        for entry in log.pending():
            sampler = by_number.get(entry.seq // SEQ_BITS)
            if sampler is not None:
                self.queue.put(self._ticket(session, sampler, log, entry))
        return log

    def _samples_of(self, session_id: str) -> Path:
        return self.directory / "samples" / session_id

    def _own_file(self, sampler: Sampler) -> Path:
        return self._samples_of(sampler.session_id) / f"weights-{sampler.id.rpartition(':')[2]}.safetensors"

    async def _add_own_sampler(self, client: TrainingClient, seq: int, number: int, state: AdapterState) -> str:
        """Make a sampling session of a client's unnamed weights. `seq`: of the request. `number`: the session's."""
        session_id, model_id = client.facts.session_id, client.facts.model_id
        origin = f"{model_id.rpartition(':')[2]}/{seq}/own"
        sampler = Sampler(sampler_id(session_id, number), session_id, model_id, is_own=True, origin=origin)
        await asyncio.to_thread(write_state, self._own_file(sampler), state)
        added = await self.sessions.add_sampler(sampler)
        added.is_gone = False
        samplers = self.sessions.sessions[session_id].samplers.values()
        own = [one for one in samplers if one.is_own and not one.is_gone]
        for old in own[: -self.config.keep_unnamed]:
            if self.queue.is_idle(old.id):
                await self._delete_own(old)
        return added.id

    async def _drop_own_weights(self, session: Session) -> None:
        for sampler in session.samplers.values():
            await self.queue.drop(sampler.id)
            await self._delete_own(sampler)

    async def _delete_own(self, sampler: Sampler) -> None:
        if sampler.is_own and not sampler.is_gone:
            sampler.is_gone = True
            file = self._own_file(sampler)
            file.unlink(missing_ok=True)
            await self.publications.drop(file)

    async def _watch(self) -> None:
        period = max(0.05, min(10.0, self.config.session_timeout_s / 4))
        while True:
            await asyncio.sleep(period)
            try:
                await self._tidy()
            except (PenstockError, OSError) as error:
                _LOG.warning("%s", error)

    async def _tidy(self) -> None:
        """Bring the adapters of sessions without a heartbeat to the disk, delete their unnamed weights, and checkpoints
        whose time is over."""
        oldest = time.time() - self.config.session_timeout_s
        for session in list(self.sessions.sessions.values()):
            session.is_resting = session.last_seen < oldest
            if session.is_resting and not session.is_over:
                await self._rest(session)
        for address in await asyncio.to_thread(self.checkpoints.expired):
            with contextlib.suppress(NoCheckpoint):  # its client was faster
                await self.delete_checkpoint(address)

    async def delete_checkpoint(self, address: Address) -> None:
        """Delete a checkpoint here and on the engines. Raises `NoCheckpoint`."""
        await asyncio.to_thread(self.checkpoints.delete, address)
        await self.publications.drop(self.checkpoints.file(address))

    async def _rest(self, session: Session) -> None:
        await self._drop_own_weights(session)
        for model_id in session.clients:
            client = self.clients.get(model_id)
            if client is not None and client.is_resident and client.next is None:
                self.ranks.rest(client)

    def _touch(self, session_id: str) -> None:
        """Note that a session is alive."""
        self.sessions.sessions[session_id].last_seen = time.time()

    def _note_training(self, client: TrainingClient, entry: Entry, seconds: float) -> None:
        usage = self.tenants.usage[client.facts.tenant]
        usage.requests[entry.kind] += 1
        usage.failures += entry.is_failure
        usage.seconds_trained += seconds
        usage.tokens_trained += entry.tokens if entry.kind.startswith("forward") else 0

    def _note_sampling(self, ticket: Ticket, output: SampleOutput, seconds: float) -> None:
        usage = self.tenants.usage[ticket.tenant]
        usage.requests["sample"] += 1
        usage.seconds_sampled += seconds
        usage.tokens_sampled += sum(len(sample.token_ids) for sample in output.samples)


def client_id(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


def sampler_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def number_of(sampler: Sampler, seq: int) -> int:
    """Number of a sampling session's request among all of its session."""
    return int(sampler.id.rpartition(":")[2]) * SEQ_BITS + seq
