"""Carries out requests for samples on the engines: many at once, up to a bound, in a fair order of tenants.

They wait for nobody's training. A request is journaled like one that trains, so after a start of the server those
without a result are drawn again, with the seeds that they had.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.serve.backend import Backend, BackendFailed, DeadlyRequest
from penstock.serve.checkpoints import read_state
from penstock.serve.journal import JournalDamaged, JournalError
from penstock.serve.request_log import Entry, RequestLog
from penstock.serve.schedule import Schedule, Waiting
from penstock.serve.tenants import Tenants
from penstock.serve.wire.requests import SampleRequest
from penstock.serve.wire.results import Answer, failure, sample_answer
from penstock.workers.calls.sample_calls import SampleOutput
from penstock.workers.calls.training_calls import AdapterState
from penstock.workers.gateway.http.errors import BadRequest
from penstock.workers.lifecycle.concurrent_tasks import cancel_all

_LOG = logging.getLogger("penstock")
LOOK_S = 1.0
"""Seconds between looks at budgets that refill."""


@dataclass(frozen=True)
class Ticket:
    """A request for samples in its queue."""

    tenant: str
    queue: str
    """Its sampling session."""
    log: RequestLog
    entry: Entry
    request: Callable[[], SampleRequest]
    """Decodes it, in any thread. Raises `BadRequest`."""
    file: Callable[[], Path | None]
    """File of the weights; None: the base model. Raises `DataError` if they are gone."""


class Publications:
    """Weights that engines have, each under a name that is given once: brought there when they are first sampled from,
    and dropped when others need their place or when they are deleted.

    Lifecycle: `name_of` weights before each sample, `release` after it; `drop` deleted ones. Weights come one after the
    other, and a sample from those that are there waits for no others.
    """

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend, self._most = backend, most
        self._names: dict[Path, str] = {}
        """Names on the engines by the file of their state, the one that has rested longest first."""
        self._arriving: dict[Path, asyncio.Task[None]] = {}
        self._using: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    async def name_of(self, file: Path, read: Callable[[Path], AdapterState] | None = None) -> str:
        """The name of weights on the engines, which keep them until `release`. Raises `DataError`, and what
        `Backend.publish` raises."""
        while (name := self._names.pop(file, "")) == "":
            if file not in self._arriving:
                task = self._arriving[file] = asyncio.create_task(self._publish(file, read or _weights))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # where nobody waits any more
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
        name = self._names.pop(file, None)
        if name is not None and name not in self._using:
            await self._backend.drop_sampler(name)

    async def _publish(self, file: Path, read: Callable[[Path], AdapterState]) -> None:
        try:
            async with self._lock:
                await self._make_room()
                state = await asyncio.to_thread(read, file)
                name = secrets.token_hex(8)
                await self._backend.publish(name, state)
                self._names[file] = name
        finally:
            del self._arriving[file]

    async def _make_room(self) -> None:
        while len(self._names) >= self._most:
            idle = next((file for file, name in self._names.items() if name not in self._using), None)
            if idle is None:
                return
            await self._backend.drop_sampler(self._names.pop(idle))


class SamplingQueue:
    """Lifecycle: `run` until `close`; `put` tickets, `cancel` some."""

    def __init__(
        self, backend: Backend, publications: Publications, schedule: Schedule, tenants: Tenants, most: int,
        note: Callable[[Ticket, SampleOutput | None, float], None] = lambda ticket, output, seconds: None,
    ) -> None:  # fmt: skip
        """`most`: requests that engines have at the same time."""
        self._backend, self._publications, self._schedule, self._most = backend, publications, schedule, most
        self._tenants, self._note = tenants, note
        self._queues: dict[str, deque[Ticket]] = {}
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._is_closing = False
        self._failure: BaseException | None = None

    def put(self, ticket: Ticket) -> None:
        self._queues.setdefault(ticket.queue, deque()).append(ticket)
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
            key = ticket.queue, ticket.entry.seq
            self._running[key] = task = asyncio.create_task(self._carry_out(ticket))
            task.add_done_callback(lambda task, key=key: self._ended(key, task))  # type: ignore[misc]

    async def cancel(self, queue: str, seq: int, log: RequestLog) -> None:
        """End a request that nobody waits for any more."""
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
        waiting = [Waiting(ticket.queue, ticket.tenant, ticket.entry.tokens) for ticket in fronts]
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

    async def _carry_out(self, ticket: Ticket) -> None:
        started = time.monotonic()
        try:
            answer = await self._answered(ticket, started)
            await ticket.log.answer(ticket.entry, answer)
            if answer.is_failure:
                self._note(ticket, None, time.monotonic() - started)
        except JournalError as error:
            _LOG.warning("%s: %s", ticket.queue, error)
            await asyncio.sleep(LOOK_S)
            if not ticket.log.is_closed:
                self.put(ticket)

    async def _answered(self, ticket: Ticket, started: float) -> Answer:
        if refusal := self._tenants.refusal(ticket.tenant, started):
            return failure(refusal, is_users=True)
        try:
            request, file = await asyncio.to_thread(ticket.request), ticket.file()
            name = await self._publications.name_of(file) if file is not None else None
            try:
                output = await self._backend.sample(name, request.call)
            finally:
                if name is not None:
                    await self._publications.release(name)
            self._note(ticket, output, time.monotonic() - started)
            return sample_answer(output, request)
        except JournalDamaged as error:
            return failure(str(error), is_users=False)
        except (JournalError, BackendFailed):
            raise
        except DeadlyRequest as error:
            self._tenants.refuse(ticket.tenant, str(error), time.monotonic() + self._backend.window_s)
            return failure(self._tenants.refusal(ticket.tenant, time.monotonic()), is_users=True)
        except (BadRequest, DataError, ConfigError) as error:
            return failure(str(error), is_users=True)
        except PenstockError as error:
            return failure(str(error), is_users=False)
        except Exception as error:  # noqa: BLE001 - a fault of one request must not end those of others
            _LOG.exception("%s: request %d for samples has failed", ticket.queue, ticket.entry.seq)
            return failure(f"{type(error).__name__}: {error}", is_users=False)


def _weights(file: Path) -> AdapterState:
    return read_state(file, with_optimizer=False)
