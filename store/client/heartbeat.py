"""Leases stay alive while their owner's process does: a thread of each client renews all that it knows of.

So the deadline of a lease can be short (a dead worker's rows soon go to another) however long the work on it
takes, and whatever the worker's event loop is blocked by. A process loses its leases if it is gone, stopped, or
inside one call that does not let go of Python's lock for `store.lease_timeout_s`. A worker that computes for ever looks
to the store like one that computes for long: deadlines of the work itself are the workers'. `pulse.py` is how the
thread calls the store.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable

from penstock.conf.errors import StoreError, WorkerDied
from penstock.store.client.pulse import Pulse

BEATS_PER_TIMEOUT = 3
"""Renewals of a lease before it would run out."""
_LOG = logging.getLogger("penstock")


class Heartbeat:
    """A thread that beats while anything is held or asked for, and the event loop of the client is open.

    heartbeat.begin(pulse, timeout_s)
    heartbeat.asked(ticket)         # what the store gives to this request is renewed before it arrives
    heartbeat.hold(lease_id, rows)  # renewed until these rows have their result
    heartbeat.answered(ticket)
    heartbeat.finished(lease_id, rows)

    A beat that fails is tried again at the next one. The thread ends when the store is closed, since nothing expires
    then, or its process gone, which every call is told. Should anything else end it, the log and the next caller are
    told.
    """

    def __init__(self) -> None:
        self._pulse: Pulse | None = None
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

    def begin(self, pulse: Pulse, timeout_s: float) -> None:
        """Set up, before all other calls. `pulse`: the thread's own connection to the store, which must not keep the
        client's open: the end of that one gives leases back. `timeout_s`: a lease runs out after so long unless it is
        renewed."""
        self._pulse, self._timeout_s = pulse, timeout_s

    def asked(self, ticket: int) -> None:
        """Note a request that goes out. Raises `StoreError` if leases cannot be renewed any more."""
        if self._failure is not None:
            raise StoreError(f"leases are not renewed any more: {self._failure!r}.") from self._failure
        with self._lock:
            self._tickets.add(ticket)
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
        assert self._pulse is not None
        if self._thread is None and not self._stopped.is_set():
            arguments = self._pulse, asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, args=arguments, name="store-heartbeat", daemon=True)
            self._thread.start()

    def _run(self, pulse: Pulse, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._beat(pulse, loop)
        except WorkerDied as gone:
            _LOG.debug("leases are not renewed any more: %s", gone)
        except Exception as failure:  # noqa: BLE001 - whatever ends a heartbeat, its owner is told
            self._failure = failure
            _LOG.warning("leases are not renewed any more: %r", failure)
        finally:
            with self._lock:
                self._end(pulse)

    def _end(self, pulse: Pulse) -> None:
        """Let the next thread begin. Under the lock."""
        if self._thread is threading.current_thread():
            pulse.close()
            self._thread = None

    def _beat(self, pulse: Pulse, loop: asyncio.AbstractEventLoop) -> None:
        """Renew until nothing is left to renew. Raises what is final."""
        interval_s = self._timeout_s / BEATS_PER_TIMEOUT
        heard = time.monotonic()
        while not self._stopped.wait(interval_s) and not loop.is_closed():
            with self._lock:
                if not self._open and not self._tickets:
                    self._end(pulse)  # here, so that nobody takes what ends for what beats
                    return
                held, tickets = list(self._open), list(self._tickets)
            try:
                self.unhold(*pulse.renew(held, tickets, interval_s))
                heard = time.monotonic()
            except OSError as failure:  # a timeout, or a connection that broke: the next beat tries again
                if time.monotonic() - heard > self._timeout_s:
                    _LOG.warning("leases could not be renewed for %.0f s: %s", time.monotonic() - heard, failure)
                    heard = time.monotonic()
