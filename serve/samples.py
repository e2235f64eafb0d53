"""Samples: requests for them, and the weights that sampling sessions sample from.

    endpoint ─▶ take ─▶ the session's RequestLog ─▶ SamplingQueue ─▶ engines
    weights     a checkpoint's file, or unnamed ones, which a training client publishes beside the requests

SAMPLES/SESSION/requests.journal, results.journal, weights-NUMBER.safetensors

Engines carry out many requests at once, up to a bound, in a fair order of tenants, and wait for nobody's training. A
request is journaled like one that trains, so after a start of the server those without a result are drawn again, with
the seeds that they had.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.conf.serve import ServeConfig
from penstock.orchestrator.loops.verbs import seed_of
from penstock.serve.backend import Backend, BackendFailed, DeadlyRequest
from penstock.serve.journal import Entry, JournalDamaged, JournalError, RequestLog
from penstock.serve.saved_weights import Checkpoints, WeightsAddress, read_state, write_state
from penstock.serve.sdk_messages import RequestResult, SampleRequest, failure, sample_answer, sample_request
from penstock.serve.sessions import ClientFacts, ClientSession, Sampler, Sessions
from penstock.serve.tenants import NextRequest, Schedule, Tenants
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.protocols import AdapterState
from penstock.workers.runtime.async_tasks import cancel_all

_LOG = logging.getLogger("penstock")
LOOK_S = 1.0
"""Seconds between checks of budgets, which refill."""


@dataclass(frozen=True)
class Ticket:
    """A request for samples in its queue."""

    tenant: str
    sampler: Sampler
    log: RequestLog
    entry: Entry


class Publications:
    """Weights that engines have, each under a name that is given once: brought there when they are first sampled from,
    and dropped when others need their place or when they are deleted.

    Lifecycle: `name_of` weights before each sample, `release` after it; `drop` deleted ones. Weights come one after the
    other, and a sample from those that are there waits for no others.
    """

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend, self._most = backend, most
        self._names: dict[Path, str] = {}
        """Names on the engines by the file of their state, the least recently used first."""
        self._arriving: dict[Path, asyncio.Task[None]] = {}
        self._using: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    async def name_of(self, file: Path) -> str:
        """The name of weights on the engines, which keep them until `release`. Raises `DataError`, and what
        `Backend.publish` raises."""
        while (name := self._names.pop(file, "")) == "":
            if file not in self._arriving:
                task = self._arriving[file] = asyncio.create_task(self._publish(file))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # of a cancelled sample
            await asyncio.shield(self._arriving[file])
        self._names[file] = name
        self._using[name] += 1
        return name

    async def release(self, name: str) -> None:
        """Note that a sample from these weights has ended."""
        self._using[name] -= 1
        if not self._using[name]:
            del self._using[name]
            if name not in self._names.values():
                await self._backend.drop_sampler(name)

    async def drop(self, file: Path) -> None:
        """Drop deleted weights, once nobody samples from them."""
        if file in self._arriving:
            await asyncio.wait([self._arriving[file]])
        if (name := self._names.pop(file, None)) is not None and name not in self._using:
            await self._backend.drop_sampler(name)

    async def _publish(self, file: Path) -> None:
        try:
            async with self._lock:
                while len(self._names) >= self._most:
                    idle = next((other for other, name in self._names.items() if name not in self._using), None)
                    if idle is None:
                        break
                    await self._backend.drop_sampler(self._names.pop(idle))
                state = await asyncio.to_thread(read_state, file, with_optimizer=False)
                name = secrets.token_hex(8)
                await self._backend.publish(name, state)
                self._names[file] = name
        finally:
            del self._arriving[file]


class SamplingQueue:
    """Lifecycle: `run` until `close`; `put` tickets, `cancel` some."""

    def __init__(self, schedule: Schedule, most: int, carry_out: Callable[[Ticket], Coroutine[Any, Any, None]]) -> None:
        """`most`: requests that engines have at the same time."""
        self._schedule, self._most, self._carry_out = schedule, most, carry_out
        self._queues: dict[str, deque[Ticket]] = {}
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._is_closing = False
        self._failure: BaseException | None = None

    def put(self, ticket: Ticket) -> None:
        self._queues.setdefault(ticket.sampler.id, deque()).append(ticket)
        self._wake.set()

    def is_idle(self, queue: str) -> bool:
        """Return whether a sampling session has no requests, waiting or under way."""
        return not self._queues.get(queue) and all(name != queue for name, _ in self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        while not self._is_closing:
            if self._failure is not None:
                raise self._failure
            self._wake.clear()
            ticket = self._picked() if len(self._running) < self._most else None
            if ticket is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
                continue
            key = ticket.sampler.id, ticket.entry.seq
            self._running[key] = task = asyncio.create_task(self._carry_out(ticket))
            task.add_done_callback(lambda task, key=key: self._ended(key, task))  # type: ignore[misc]

    async def cancel(self, queue: str, seq: int, log: RequestLog) -> None:
        """Cancel a request, waiting or under way."""
        left = deque(ticket for ticket in self._queues.pop(queue, ()) if ticket.entry.seq != seq)
        if left:
            self._queues[queue] = left
        task, entry = self._running.get((queue, seq)), log.entries.get(seq)
        await cancel_all([task] if task is not None else [])
        if entry is not None and not entry.is_done.is_set():
            await log.answer(entry, failure("the request was cancelled.", is_users=True))

    async def drop(self, queue: str) -> None:
        """Forget all requests of a sampling session that is over."""
        self._queues.pop(queue, None)
        self._schedule.forget(queue)
        await cancel_all([task for (name, _), task in self._running.items() if name == queue])

    async def close(self, timeout_s: float) -> None:
        """End; requests under way have this time, those left are drawn again after the next start."""
        self._is_closing = True
        self._wake.set()
        tasks = list(self._running.values())
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        await cancel_all(tasks)

    def _picked(self) -> Ticket | None:
        fronts = [queue[0] for queue in self._queues.values() if queue]
        waiting = [NextRequest(ticket.sampler.id, ticket.tenant, ticket.entry.tokens) for ticket in fronts]
        chosen = self._schedule.pick(waiting, time.monotonic()) if waiting else None
        if chosen is None:
            return None
        queue = self._queues[chosen.queue]
        ticket = queue.popleft()
        if not queue:
            del self._queues[chosen.queue]
        return ticket

    def _ended(self, key: tuple[str, int], task: "asyncio.Task[None]") -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            self._failure = self._failure or task.exception()
        self._wake.set()


SEQ_BITS = 2**64
"""Numbers of requests in one sampling session, of all its clients."""


class Samples:
    """Lifecycle: `resume` sessions of the server before; `take` requests; `finish` a session; `close`. `queue`
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
        self.queue = SamplingQueue(self.schedule, config.max_sampling, self._carry_out)

    def log_of(self, session: ClientSession) -> RequestLog | None:
        """Requests of a session, opened where they are closed; None if it has had none. Raises `JournalError`."""
        log = self.logs.get(session.id)
        return log or (self._open(session) if not session.is_over and self._of(session.id).exists() else None)

    def resume(self, session: ClientSession) -> None:
        """Go on with the requests of a session that have no result yet. Raises `JournalError`."""
        if (log := self.log_of(session)) is not None and not log.pending():
            del self.logs[session.id]

    async def take(self, sampler: Sampler, entry: Entry, body: bytes, admit: Callable[[int], None]) -> Entry:
        """Take a request for samples, with its number in its sampling session. `admit`: called with the bytes that are
        new. Raises what that raises, and `JournalError`."""
        session = self._sessions.sessions[sampler.session_id]
        log = self.logs.get(session.id) or self._open(session)
        entry.seq = number_of(sampler, entry.seq)
        is_known = entry.seq in log.entries
        admit(0 if is_known else len(body))
        entry = await log.accept(entry, body)
        if not is_known:
            self.queue.put(Ticket(session.tenant, sampler, log, entry))
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
        return self._checkpoints.file(WeightsAddress.parse(sampler.path), sampler.save)

    def decoded(self, body: bytes, sampler: Sampler, seq: int) -> SampleRequest:
        """Decode a request. Raises `BadRequest`."""
        seed = seed_of("sample", sampler.origin, seq)
        return sample_request(body, self._backend.facts.max_length, seed)

    async def add_own(self, facts: ClientFacts, seq: int, number: int, state: AdapterState) -> str:
        """Make a sampling session of a client's unnamed weights. `seq`: of the request. `number`: the session's."""
        session_id, model_id = facts.session_id, facts.model_id
        origin = f"{model_id.rpartition(':')[2]}/{seq}/own"
        sampler = Sampler(sampler_id(session_id, number), session_id, model_id, is_own=True, origin=origin)
        known = self._sessions.sessions[session_id].samplers.get(sampler.id)
        if known is not None and not known.has_same_weights(sampler):
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

    async def rest(self, session: ClientSession) -> None:
        """Drop a session's requests, delete its unnamed weights, and close its files."""
        for sampler in list(session.samplers.values()):
            await self._drop(sampler)
        if (log := self.logs.get(session.id)) is not None:
            await log.close()
            if self.logs.get(session.id) is log:  # another one is made of its files once it is closed
                del self.logs[session.id]

    async def drop_unused_saves(self, address: WeightsAddress | None = None) -> None:
        """Drop the saves that a name no longer stands for and nobody samples from; None: of all names."""
        for save in await asyncio.to_thread(self._checkpoints.superseded_saves, address):
            if not self._sessions.uses[save]:
                await self.publications.drop(await asyncio.to_thread(self._checkpoints.remove, save))

    async def finish(self, session: ClientSession) -> None:
        """Delete a session's requests and its unnamed weights; it takes no more of them."""
        await self.rest(session)
        await asyncio.to_thread(shutil.rmtree, self._of(session.id), ignore_errors=True)

    async def close(self) -> None:
        for log in list(self.logs.values()):
            await log.close()

    def _open(self, session: ClientSession) -> RequestLog:
        log = self.logs[session.id] = RequestLog(self._of(session.id), self._config.keep_results)
        by_number = {one.number: one for one in session.samplers.values()}
        for entry in log.pending():
            if (sampler := by_number.get(entry.seq // SEQ_BITS)) is not None:
                self.queue.put(Ticket(session.tenant, sampler, log, entry))
        return log

    async def _carry_out(self, ticket: Ticket) -> None:
        started = time.monotonic()
        try:
            answer, tokens = await self._answered(ticket)
            await ticket.log.answer(ticket.entry, answer)
            self._tenants.count_request(ticket.tenant, ticket.entry, time.monotonic() - started, tokens)
        except JournalError as error:
            _LOG.warning("%s: %s", ticket.sampler.id, error)
            await asyncio.sleep(LOOK_S)
            if not ticket.log.is_closed:
                self.queue.put(ticket)

    async def _answered(self, ticket: Ticket) -> tuple[RequestResult, int]:
        """The answer to a request, and the tokens that were sampled for it. Raises `JournalError`, `BackendFailed`."""
        if refusal := self._tenants.refusal(ticket.tenant, time.monotonic()):
            return failure(refusal, is_users=True), 0
        sampler, entry, file = ticket.sampler, ticket.entry, None
        try:
            body = await asyncio.to_thread(ticket.log.body_of, entry)
            request = await asyncio.to_thread(self.decoded, body, sampler, entry.seq % SEQ_BITS)
            file = self.file_of(sampler)
            name = await self.publications.name_of(file) if file is not None else None
            try:
                output = await self._backend.sample(name, request.call, ticket.tenant)
            finally:
                if name is not None:
                    await self.publications.release(name)
            return sample_answer(output, request), sum(len(sample.token_ids) for sample in output.samples)
        except DeadlyRequest as error:
            if file is not None:  # the engines may have given the weights up: they get them anew
                with contextlib.suppress(PenstockError):
                    await self.publications.drop(file)
            refusal = self._tenants.refuse(ticket.tenant, error, time.monotonic(), self._backend.window_s)
            return failure(refusal, is_users=True), 0
        except Exception as error:  # noqa: BLE001 - a fault of one request must not end those of others
            return failure_of(error, f"{sampler.id}: request {entry.seq} for samples"), 0

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


def failure_of(error: Exception, what: str) -> RequestResult:
    """The answer to a request that has failed. Raises the error of one that is carried out again, once the disk takes
    it (`JournalError`) or by the next server (`BackendFailed`)."""
    if isinstance(error, OSError):
        raise JournalError(f"{what}: {error}. It is tried again.") from error
    if isinstance(error, BackendFailed) or (isinstance(error, JournalError) and not isinstance(error, JournalDamaged)):
        raise error
    if isinstance(error, PenstockError):
        return failure(str(error), is_users=isinstance(error, BadRequest | DataError | ConfigError))
    _LOG.error("%s has failed", what, exc_info=error)
    return failure(f"{type(error).__name__}: {error}", is_users=False)


def sampler_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def number_of(sampler: Sampler, seq: int) -> int:
    """Number of a sampling session's request among all of its session."""
    return sampler.number * SEQ_BITS + seq
