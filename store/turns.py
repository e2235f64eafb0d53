"""A queue of callers that wait for something: woken one after the other, first come first served, nobody polls.

Used by `store/store.py`, one for each stage and one for producers.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Whoever is woken tries; if it succeeds there may be something for the next one too, so `pass_on` is called.

    A caller that is cancelled has taken nothing, since it only tries in its own turn, and its turn is passed on.
    """

    def __init__(self, pass_on: Callable[[], None]) -> None:
        """`pass_on`: called when somebody else may have a turn; it ends in `wake_first` or `wake_all`."""
        self._pass_on = pass_on
        self._queue: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Callers that wait."""
        return len(self._queue)

    async def wait(self, attempt: Callable[[], T | None]) -> T | None:
        """The first result of `attempt` that is not None; it is tried now, and when it is this caller's turn.

        None once closed.
        """
        if not self._queue and not self._closed:
            result = attempt()
            if result is not None:
                return result
        first = True
        while not self._closed:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn) if first else self._queue.appendleft(turn)
            first = False
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._queue:
                    self._queue.remove(turn)
                self._pass_on()
                raise
            if self._closed:
                break
            result = attempt()
            if result is not None:
                self._pass_on()
                return result
        return None

    def wake_first(self) -> None:
        if self._queue:
            _wake(self._queue.popleft())

    def wake_all(self) -> None:
        waiting, self._queue = self._queue, deque()
        for turn in waiting:
            _wake(turn)

    def close(self) -> None:
        """All that wait, now or later, get None."""
        self._closed = True
        self.wake_all()


def _wake(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
