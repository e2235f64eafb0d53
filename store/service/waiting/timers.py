"""Timers of a store: one for the lease that may expire next, one for the group that will be slow next."""

import asyncio
from collections.abc import Callable, Mapping

from penstock.store.ledger.effects import Effects
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.messages import LeaseRequest

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


class Slow:
    """A timer for the next group that an engine has had for too long, and the choice among engines that wait and may
    take it as well. `ledger/stragglers.py` decides what is slow. Lifecycle: `arm` after any event, `cancel`."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], wake: Callable[[int], None]) -> None:
        """Prepare the timer. `wake`: of a stage, by number, soon; called when a group has become slow."""
        self._ledger, self._clock, self._wake = ledger, clock, wake
        self._timer: asyncio.TimerHandle | None = None

    def owners(self) -> set[str]:
        """Owners of the groups that may be taken by another."""
        return {lease.owner for _, lease in self._ledger.residents.stragglers.slow(self._clock())}

    def priority(self, held: Mapping[str, int]) -> Callable[[LeaseRequest], tuple[bool, int]] | None:
        """The priority of a request, the lowest is next: one that can take a group, and holds the fewest. None if there
        is nothing to take. `held`: units by client."""
        owners = self.owners()
        return (lambda ask: (owners == {ask.owner}, held.get(ask.client, 0))) if owners else None

    def arm(self) -> None:
        self.cancel()
        stragglers, stage = self._ledger.residents.stragglers, self._ledger.residents.sampling
        if stage is not None and (due := stragglers.next_slow()) is not None:
            wait_s = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._due, stage.index)

    def _due(self, stage: int) -> None:
        self.owners()  # what is slow by now is noted, even if nobody may take it yet: no timer is set for it again
        self._wake(stage)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
