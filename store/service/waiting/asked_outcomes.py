"""The source of groups, where it waits for outcomes of earlier ones (`ledger/outcomes.py`)."""

from penstock.store.errors import StoreError
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.outcomes import Outcome
from penstock.store.service.waiting.wait_queue import WaitQueue


class AskedOutcomes:
    """Calls that wait for outcomes. Lifecycle: `wait` for each call, `wake` after any event, `close`."""

    def __init__(self, ledger: Ledger) -> None:
        self._residents = ledger.residents
        self._queue = WaitQueue(lambda: None)

    async def wait(self, first: int, end: int) -> list[Outcome | None] | None:
        """Return the outcomes of the groups from `first` to before `end`, once all are known. None when closed."""
        outcomes = self._residents.outcomes
        if outcomes is None:
            raise StoreError("outcomes of groups are kept in runs with data.curriculum.by alone.")
        known: list[Outcome | None] = []

        def look() -> list[Outcome | None] | None:
            for group in range(first + len(known), min(end, self._residents.next_group)):
                try:
                    known.append(outcomes.of(group, self._residents.groups.get(group)))
                except LookupError:
                    return None
            return known if len(known) >= end - first else None

        return await self._queue.wait(look, at_once=True)

    def wake(self) -> None:
        self._queue.wake_all()

    def close(self) -> None:
        self._queue.close()
