"""The ranks that wait for rounds of one stage. Used by `store.py`."""

from collections.abc import Callable
from typing import TypeVar

from penstock.store.ledger.ledger import Ledger
from penstock.store.service.wait_queue import WaitQueue

T = TypeVar("T")


class Ranks:
    """Lifecycle: `wait` for each call, `wake` after any event, `close`."""

    def __init__(self, stage: str, ledger: Ledger, schedule: Callable[[], None]) -> None:
        """`schedule`: has `wake` called soon."""
        self._ledger, self._name = ledger, stage
        self._queue = WaitQueue(schedule)
        self._heard = 0
        """`Rounds.moves` that they have heard of."""

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._queue)

    async def wait(self, attempt: Callable[[], T | None]) -> T | None:
        """The first result of `attempt`, which is tried at once: each rank is after a round of its own. None when
        closed."""
        return await self._queue.wait(attempt, at_once=True)

    def wake(self) -> None:
        """All, when a round can be formed, or has been formed or ended."""
        rounds = self._ledger.rounds
        stage, moves = self._ledger.residents.stage(self._name), rounds.moves[self._name]
        if len(self._queue) and (moves != self._heard or rounds.may_form(stage)):
            self._queue.wake_all()
        self._heard = moves

    def close(self) -> None:
        self._queue.close()
