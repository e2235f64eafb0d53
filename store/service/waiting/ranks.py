"""Ranks that wait for rounds of one stage."""

from collections.abc import Callable
from typing import TypeVar

from penstock.store.ledger.ledger import Ledger
from penstock.store.service.waiting.wait_queue import WaitQueue

T = TypeVar("T")


class Ranks:
    """The ranks of one stage. Lifecycle: `wait` for each call, `wake` whenever a round may be there, `close`."""

    def __init__(self, stage: str, ledger: Ledger, schedule: Callable[[], None]) -> None:
        """Prepare the queue. `schedule`: has `wake` called soon."""
        self._ledger, self._name = ledger, stage
        self._queue = WaitQueue(schedule)

    def __len__(self) -> int:
        """Number of calls that wait."""
        return len(self._queue)

    async def wait(self, attempt: Callable[[], T | None]) -> T | None:
        """Return the first result of `attempt`, which is tried at once: each rank is after a round of its own. None
        when closed."""
        return await self._queue.wait(attempt, at_once=True)

    def wake(self, *, moved: bool) -> None:
        """Wake all, when a round can be formed, or one has `moved`: it was formed, ended or taken back."""
        stage = self._ledger.residents.stage(self._name)
        if len(self._queue) and (moved or self._ledger.rounds.may_form(stage)):
            self._queue.wake_all()

    def close(self) -> None:
        self._queue.close()
