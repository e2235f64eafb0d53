"""Groups that an engine has had for too long, and the engines that wait and may take them as well: a timer for the next
one, and which of the waiting engines tries first. `ledger/stragglers.py` decides.
"""

import asyncio
from collections.abc import Callable, Mapping

from penstock.store.ledger.ledger import Ledger
from penstock.store.service.calls import LeaseRequest


class Slow:
    """A timer for the next slow group. Lifecycle: `arm` after any event, `cancel`."""

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
