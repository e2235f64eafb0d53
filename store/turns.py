"""A queue of callers that wait for something: woken one after the other, first come first served, nobody polls.

Used by `store/store.py`, one for each stage and one for producers.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Waiting:
    """One caller. `turn` becomes true when it may try, false when it was withdrawn."""

    turn: "asyncio.Future[bool]"
    client: Hashable
    ticket: int


class Turns:
    """Whoever is woken tries; if it succeeds there may be something for the next one too, so `pass_on` is called.

    A caller that is cancelled or withdrawn has taken nothing, since it only tries in its own turn, and its turn is
    passed on.
    """

    def __init__(self, pass_on: Callable[[], None]) -> None:
        """`pass_on`: called when somebody else may have a turn; it ends in `wake_first` or `wake_all`."""
        self._pass_on = pass_on
        self._queue: deque[Waiting] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Callers that wait."""
        return len(self._queue)

    @property
    def clients(self) -> list[Hashable]:
        """Of those that wait, in order."""
        return [waiting.client for waiting in self._queue]

    async def wait(self, attempt: Callable[[], T | None], client: Hashable = None, ticket: int = 0) -> T | None:
        """The first result of `attempt` that is not None; it is tried now, and when it is this caller's turn.

        None once closed or withdrawn. `client` and `ticket` say who waits, for `withdraw`.
        """
        if not self._queue and not self._closed:
            result = attempt()
            if result is not None:
                return result
        first = True
        while not self._closed:
            waiting = Waiting(asyncio.get_running_loop().create_future(), client, ticket)
            self._queue.append(waiting) if first else self._queue.appendleft(waiting)
            first = False
            try:
                goes_on = await waiting.turn
            except asyncio.CancelledError:
                if waiting in self._queue:
                    self._queue.remove(waiting)
                self._pass_on()
                raise
            if self._closed or not goes_on:
                break
            result = attempt()
            if result is not None:
                self._pass_on()
                return result
        return None

    def withdraw(self, client: Hashable, ticket: int | None = None) -> int:
        """The calls of `client` (that of one ticket, or all) give up their places; how many they were."""
        leaving = [waiting for waiting in self._queue if waiting.client == client and ticket in (None, waiting.ticket)]
        for waiting in leaving:
            self._queue.remove(waiting)
            _wake(waiting, goes_on=False)
        return len(leaving)

    def wake_first(self) -> None:
        if self._queue:
            _wake(self._queue.popleft())

    def wake_all(self) -> None:
        waiting, self._queue = self._queue, deque()
        for one in waiting:
            _wake(one)

    def close(self) -> None:
        """All that wait, now or later, get None."""
        self._closed = True
        self.wake_all()


def _wake(waiting: Waiting, *, goes_on: bool = True) -> None:
    if not waiting.turn.done():
        waiting.turn.set_result(goes_on)
