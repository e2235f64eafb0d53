"""The deadline of the lease that may expire next: one timer."""

import asyncio
from collections.abc import Callable

from penstock.store.ledger.effects import Effects
from penstock.store.ledger.ledger import Ledger

STANDSTILL_S = 0.1
"""Lateness of a timer, in seconds, that tells that the store's process stood still."""


class Expiry:
    """A timer for the next deadline. Lifecycle: `arm` after any event, `cancel`."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], carry_out: Callable[[Effects], None]) -> None:
        """Prepare the timer. `carry_out`: called after leases may have expired."""
        self._ledger, self._clock, self._carry_out = ledger, clock, carry_out
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """The time at which the timer fires, by the clock."""
        self._patient_until = 0.0
        """The time before which nothing expires, by the clock."""

    def arm(self) -> None:
        """Set the timer. One that is too early stays: most leases end long before, and it costs a look at the next
        deadline."""
        deadline = self._ledger.next_deadline()
        if deadline is None:
            self.cancel()
            return
        due = max(deadline, self._patient_until)
        if self._timer is not None and self._due <= due:
            return
        self.cancel()
        self._due = due
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - self._clock()), self._expire, due)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, due: float) -> None:
        """Expire leases whose deadline has come. If this process stood still until long after it, renewals lie unread:
        they come first."""
        self._timer = None
        if self._clock() - due > STANDSTILL_S and due > self._patient_until:
            self._patient_until = self._clock() + STANDSTILL_S
            self.arm()
            return
        _, effects = self._ledger.expire(self._clock())
        self._carry_out(effects)
