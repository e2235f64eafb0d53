"""Leases stay alive while their owner's process does: a thread of each client renews all that it knows of.

So the deadline of a lease can be short (a dead worker's rows soon go to another) however long the work on it
takes, and whatever the worker's event loop is blocked by. A process loses its leases if it is gone, stopped, or
inside one call that does not let go of Python's lock for `store.lease_timeout_s`. A worker that computes for ever looks
to the store like one that computes for long: deadlines of the work itself are the workers'. The thread calls the store
over a connection of its own, its `LeaseRenewer`, beside the event loop of its client, which may be blocked.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.conf.errors import PartnerGone, StoreError, WorkerDied
from penstock.network.connection import Connection
from penstock.store.data.codec import NOTHING, Codec, Malformed
from penstock.store.service.store import Store
from penstock.store.service.wire import ANSWER, HELLO, MESSAGE, ClientMessage, Hello, StoreAnswer, calls_of

BEATS_PER_TIMEOUT = 3
"""Renewals of a lease before it would run out."""
Over = list[int] | None
"""Leases that are over; None with an error."""
_LOG = logging.getLogger("penstock")


class LeaseRenewer(Protocol):
    """The end at which the thread of a heartbeat calls the store. Each call blocks the thread for a bounded time.
    `ConnectionError` and `TimeoutError` may pass; `PartnerGone` is final."""

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        """Renew these leases, and what was given to these requests and is on its way. Returns those that are over.
        Raises `OSError` if there was no answer in time, `PartnerGone` if there will be none."""

    def close(self) -> None: ...


class InProcessRenewer:
    """A renewer for a store that lives in an event loop of this process."""

    def __init__(self, store: Store, client: str) -> None:
        self._store, self._client = store, client

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        renewing = self._store.renew(lease_ids, self._client, tickets)
        try:
            assert self._store.loop is not None
            answer = asyncio.run_coroutine_threadsafe(renewing, self._store.loop)
        except RuntimeError:
            renewing.close()
            raise PartnerGone("the store's event loop is closed.") from None
        return answer.result(timeout_s)

    def close(self) -> None:
        pass


class ConnectionRenewer:
    """A renewer with a connection of its own, made when it is needed and remade after it has broken."""

    def __init__(self, connect: Callable[[float], Connection], where: object, client: str) -> None:
        """Prepare a connection that `connect` makes, within the seconds that it is given."""
        self._connect, self._where, self._client = connect, where, client
        self._calls, self._codec = calls_of(Store), Codec()
        self._connection: Connection | None = None

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        try:
            connection = self._connected(timeout_s)
            request = self._calls.request("renew", (lease_ids, self._client, tickets))
            connection.send(MESSAGE, self._codec.encode(ClientMessage(0, request))[0])
            answer = self._heard(connection)
            while answer.number is None:  # what the store says unasked
                answer = self._heard(connection)
        except OSError:
            self.close()
            raise
        if answer.error is not None:
            raise answer.error
        return answer.value or []

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, timeout_s: float) -> Connection:
        if self._connection is None:
            try:
                self._connection = self._connect(timeout_s)
            except (ConnectionRefusedError, FileNotFoundError):
                raise PartnerGone(f"the store's process is gone, or the store is closed: {self._where}.") from None
            self._connection.send(HELLO, self._codec.encode(Hello(f"{self._client}.heartbeat"))[0])
        return self._connection

    def _heard(self, connection: Connection) -> StoreAnswer[Over]:
        frame = connection.receive()
        if frame.kind != ANSWER or frame.num_bytes:
            raise Malformed(f"the store sends a message of kind {frame.kind}.")
        answer: StoreAnswer[Over] = self._codec.decode(StoreAnswer[Over], frame.body, NOTHING)
        return answer


class Heartbeat:
    """A thread that beats while anything is held or asked for, and the event loop of the client is open.

    heartbeat.begin(renewer, timeout_s)
    heartbeat.asked(ticket)         # what the store gives to this request is renewed before it arrives
    heartbeat.hold(lease_id, rows)  # renewed until these rows have their result
    heartbeat.answered(ticket)
    heartbeat.finished(lease_id, rows)

    A beat that fails is tried again at the next one. The thread ends when the store is closed, since nothing expires
    then, or its process gone, which every call reports. If anything else ends it, the log and the next caller get the
    error.
    """

    def __init__(self) -> None:
        self._renewer: LeaseRenewer | None = None
        self._timeout_s = 0.0
        self._lock = threading.Lock()
        self._open: dict[int, set[int]] = {}
        """Rows whose result is due, by lease."""
        self._tickets: set[int] = set()
        """Requests whose answer is due."""
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._failure: Exception | None = None

    @property
    def held(self) -> dict[int, set[int]]:
        """Rows whose result is due, by lease."""
        with self._lock:
            return {lease_id: set(rows) for lease_id, rows in self._open.items()}

    @property
    def beats(self) -> bool:
        with self._lock:
            return self._thread is not None

    def begin(self, renewer: LeaseRenewer, timeout_s: float) -> None:
        """Set up, before all other calls. `renewer`: the thread's own connection to the store, which must not keep the
        client's open: the end of that one gives leases back. `timeout_s`: a lease runs out after so long unless it is
        renewed."""
        self._renewer, self._timeout_s = renewer, timeout_s

    def asked(self, ticket: int) -> None:
        """Note a request that goes out. Raises `StoreError` if leases cannot be renewed any more."""
        if self._failure is not None:
            raise StoreError(f"leases are not renewed any more: {self._failure!r}.") from self._failure
        with self._lock:
            self._tickets.add(ticket)
            if self._thread is None:
                self._start()

    def answered(self, ticket: int) -> None:
        with self._lock:
            self._tickets.discard(ticket)

    def hold(self, lease_id: int, rows: Iterable[int]) -> None:
        """Note a lease that has come."""
        if not (due := set(rows)):
            return
        with self._lock:
            self._open[lease_id] = due
            if self._thread is None:
                self._start()

    def finished(self, lease_id: int, rows: Iterable[int]) -> None:
        """Note that these rows of a lease have their result."""
        with self._lock:
            due = self._open.get(lease_id)
            if due is not None:
                due.difference_update(rows)
                if not due:
                    del self._open[lease_id]

    def unhold(self, *lease_ids: int) -> None:
        with self._lock:
            for lease_id in lease_ids:
                self._open.pop(lease_id, None)

    def stop(self) -> None:
        """Stop beating, as if the process had died."""
        self._stopped.set()

    def _start(self) -> None:
        """Start the thread. Under the lock."""
        assert self._renewer is not None
        if not self._stopped.is_set():
            arguments = self._renewer, asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, args=arguments, name="store-heartbeat", daemon=True)
            self._thread.start()

    def _run(self, renewer: LeaseRenewer, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._beat(renewer, loop)
        except WorkerDied as gone:
            _LOG.debug("leases are not renewed any more: %s", gone)
        except Exception as failure:  # noqa: BLE001 - any error that ends a heartbeat is reported to its owner
            self._failure = failure
            _LOG.warning("leases are not renewed any more: %r", failure)
        finally:
            with self._lock:
                self._end(renewer)

    def _end(self, renewer: LeaseRenewer) -> None:
        """Let the next thread begin. Under the lock."""
        if self._thread is threading.current_thread():
            renewer.close()
            self._thread = None

    def _beat(self, renewer: LeaseRenewer, loop: asyncio.AbstractEventLoop) -> None:
        """Renew until nothing is left to renew. Raises what is final."""
        interval_s = self._timeout_s / BEATS_PER_TIMEOUT
        heard = time.monotonic()
        while not self._stopped.wait(interval_s) and not loop.is_closed():
            with self._lock:
                if not self._open and not self._tickets:
                    self._end(renewer)  # here: `beats` must be false from now on
                    return
                held, tickets = list(self._open), list(self._tickets)
            try:
                self.unhold(*renewer.renew(held, tickets, interval_s))
                heard = time.monotonic()
            except OSError as failure:  # a timeout, or a connection that broke: the next beat tries again
                if time.monotonic() - heard > self._timeout_s:
                    _LOG.warning("leases could not be renewed for %.0f s: %s", time.monotonic() - heard, failure)
                    heard = time.monotonic()
