"""Samples: requests for them, and the weights that sampling sessions sample from.

    endpoint ─▶ take ─▶ the session's RequestLog ─▶ SamplingQueue ─▶ engines
    weights     a checkpoint's file, or unnamed ones, which a training client publishes beside the requests

SAMPLES/SESSION/requests.journal, results.journal, weights-NUMBER.safetensors
"""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from penstock.conf.errors import DataError
from penstock.conf.serve import ServeConfig
from penstock.orchestrator.loops.verbs import seed_of
from penstock.serve.backend import Backend
from penstock.serve.checkpoints import Address, Checkpoints, write_state
from penstock.serve.request_log import Asked, Entry, RequestLog
from penstock.serve.sampling_queue import Publications, SamplingQueue, Ticket
from penstock.serve.schedule import Schedule
from penstock.serve.sessions import Sampler, Session, Sessions
from penstock.serve.tenants import Tenants
from penstock.serve.training_client import TrainingClient
from penstock.serve.wire.requests import SampleRequest, sample_request
from penstock.workers.calls.sample_calls import SampleOutput
from penstock.workers.calls.training_calls import AdapterState

SEQ_BITS = 2**64
"""Numbers of requests in one sampling session, of all its clients."""


class Samples:
    """Lifecycle: `open` sessions that another server has left; `take` requests; `finish` a session; `close`. `queue`
    runs meanwhile."""

    def __init__(
        self, config: ServeConfig, backend: Backend, directory: Path, tenants: Tenants, sessions: Sessions,
        checkpoints: Checkpoints,
    ) -> None:  # fmt: skip
        self._config, self._backend, self._directory, self._tenants = config, backend, directory, tenants
        self._sessions, self._checkpoints = sessions, checkpoints
        self.logs: dict[str, RequestLog] = {}
        """Requests, by session."""
        self.publications = Publications(backend, 2 * config.max_loaded)
        self.schedule = Schedule(tenants.shares, tenants.budgets)
        self.queue = SamplingQueue(backend, self.publications, self.schedule, tenants, config.max_sampling, self._note)

    def log_of(self, session: Session) -> RequestLog | None:
        """Requests of a session, opened where they are closed; None if it has had none. Raises `JournalError`."""
        log = self.logs.get(session.id)
        return log or (self._open(session) if not session.is_over and self._of(session.id).exists() else None)

    def resume(self, session: Session) -> None:
        """Go on with the requests of a session that have no result yet. Raises `JournalError`."""
        log = self.log_of(session)
        if log is not None and not log.pending():
            del self.logs[session.id]

    async def take(self, sampler: Sampler, asked: Asked) -> Entry:
        """Take a request for samples, with its number in its sampling session. Raises `JournalError`."""
        session = self._sessions.sessions[sampler.session_id]
        log = self.logs.get(session.id) or self._open(session)
        number = number_of(sampler, asked.seq)
        is_known = number in log.entries
        entry = await log.accept(replace(asked, seq=number))
        if not is_known:
            self.queue.put(self._ticket(session, sampler, log, entry))
        return entry

    def file_of(self, sampler: Sampler) -> Path | None:
        """File of a sampling session's weights; None: the base model. Raises `DataError` if they are gone."""
        if sampler.is_own:
            file = self._own_file(sampler)
            if not file.exists():
                raise DataError(f"the unnamed weights of {sampler.id} are deleted: they go with their session, which "
                                f"keeps the newest {self._config.keep_unnamed} (serve.keep_unnamed). Save them under a "
                                "name to keep them.")  # fmt: skip
            return file
        if not sampler.path:
            return None
        return self._checkpoints.file(Address.parse(sampler.path), sampler.save)

    def decoded(self, body: bytes, sampler: Sampler, seq: int) -> SampleRequest:
        """Decode a request. Raises `BadRequest`."""
        seed = seed_of("sample", sampler.origin, seq)
        return sample_request(body, self._backend.facts.max_length, seed)

    async def add_own(self, client: TrainingClient, seq: int, number: int, state: AdapterState) -> str:
        """Make a sampling session of a client's unnamed weights. `seq`: of the request. `number`: the session's."""
        session_id, model_id = client.facts.session_id, client.facts.model_id
        origin = f"{model_id.rpartition(':')[2]}/{seq}/own"
        sampler = Sampler(sampler_id(session_id, number), session_id, model_id, is_own=True, origin=origin)
        known = self._sessions.sessions[session_id].samplers.get(sampler.id)
        if known is not None and not known.is_same(sampler):
            raise DataError(f"{sampler.id} was made before, of other weights. Count sampling_session_seq_id on.")
        if known is None or not self._own_file(sampler).exists():  # who samples from it stays with these bits
            await asyncio.to_thread(write_state, self._own_file(sampler), state)
        added = await self._sessions.add_sampler(sampler)
        added.is_gone = False
        samplers = self._sessions.sessions[session_id].samplers.values()
        own = [one for one in samplers if one.is_own and not one.is_gone]
        for old in own[: -self._config.keep_unnamed]:
            if self.queue.is_idle(old.id):
                await self._drop(old)
        return added.id

    async def rest(self, session: Session) -> None:
        """Drop what a session has under way, delete its unnamed weights, and close its files."""
        for sampler in list(session.samplers.values()):
            await self._drop(sampler)
        log = self.logs.get(session.id)
        if log is not None:
            await log.close()
            if self.logs.get(session.id) is log:  # another one is made of its files once it is closed
                del self.logs[session.id]

    async def drop_saves(self, address: Address | None = None) -> None:
        """Drop the saves that a name no longer stands for and nobody samples from; None: of all names."""
        for save in await asyncio.to_thread(self._checkpoints.superseded, address):
            if not self._sessions.uses[save]:
                await self.publications.drop(await asyncio.to_thread(self._checkpoints.remove, save))

    async def finish(self, session: Session) -> None:
        """Forget a session's requests and its unnamed weights, once nobody takes more of them."""
        await self.rest(session)
        await asyncio.to_thread(shutil.rmtree, self._of(session.id), ignore_errors=True)

    async def close(self) -> None:
        for log in list(self.logs.values()):
            await log.close()

    def _open(self, session: Session) -> RequestLog:
        log = self.logs[session.id] = RequestLog(self._of(session.id), self._config.keep_results)
        by_number = {one.number: one for one in session.samplers.values()}
        for entry in log.pending():
            sampler = by_number.get(entry.seq // SEQ_BITS)
            if sampler is not None:
                self.queue.put(self._ticket(session, sampler, log, entry))
        return log

    def _ticket(self, session: Session, sampler: Sampler, log: RequestLog, entry: Entry) -> Ticket:
        return Ticket(
            session.tenant, sampler.id, log, entry,
            lambda: self.decoded(log.body_of(entry), sampler, entry.seq % SEQ_BITS), lambda: self.file_of(sampler),
        )  # fmt: skip

    async def _drop(self, sampler: Sampler) -> None:
        await self.queue.drop(sampler.id)
        if sampler.is_own and not sampler.is_gone:
            sampler.is_gone = True
            file = self._own_file(sampler)
            file.unlink(missing_ok=True)
            await self.publications.drop(file)

    def _of(self, session_id: str) -> Path:
        return self._directory / session_id

    def _own_file(self, sampler: Sampler) -> Path:
        return self._of(sampler.session_id) / f"weights-{sampler.number}.safetensors"

    def _note(self, ticket: Ticket, output: SampleOutput | None, seconds: float) -> None:
        tokens = sum(len(sample.token_ids) for sample in output.samples) if output is not None else 0
        self._tenants.note(ticket.tenant, ticket.entry, seconds, tokens)


def sampler_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def number_of(sampler: Sampler, seq: int) -> int:
    """Number of a sampling session's request among all of its session."""
    return sampler.number * SEQ_BITS + seq
