"""A queue of callers that wait for something: woken one after the other, first come first served, without polling."""

import asyncio
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
LOOK = 64
"""Number of waiting callers, the first ones, that are looked at when one is chosen."""


@dataclass(eq=False)
class Waiting:
    """A waiting caller. `turn` becomes true when it may try, false when it was withdrawn."""

    turn: "asyncio.Future[bool]"
    client: Hashable
    ticket: int
    request: Any
    """The thing that it waits for, to choose among those that wait."""


class WaitQueue:
    """A queue of callers. One that is woken tries; if it succeeds there may be something for the next one too, so
    `pass_on` is called.

    A caller keeps its place until it has succeeded. One that is cancelled, withdrawn or refused has taken nothing,
    since it only tries in its own turn, and its turn is passed on.
    """

    def __init__(self, pass_on: Callable[[], None]) -> None:
        """Make an empty queue. `pass_on`: called when another caller may have a turn; it ends in `wake_first` or
        `wake_all`."""
        self._pass_on = pass_on
        self._queue: dict[Waiting, None] = {}
        self._closed = False
        self._woken: Waiting | None = None
        """The caller that is about to try."""
        self._missed = False
        """True if a caller was to be woken while another had the turn."""

    def __len__(self) -> int:
        """Number of callers that wait."""
        return len(self._queue)

    @property
    def clients(self) -> list[Hashable]:
        """Clients of the callers that wait, in order."""
        return [waiting.client for waiting in self._queue]

    @property
    def requests(self) -> list[Any]:
        """Requests of the first that wait, in order."""
        return [waiting.request for waiting in itertools.islice(self._queue, LOOK)]

    async def wait(
        self,
        attempt: Callable[[], T | None],
        client: Hashable = None,
        ticket: int = 0,
        request: Any = None,
        *,
        at_once: bool = False,
    ) -> T | None:
        """Return the first result of `attempt` that is not None; it is tried now, and when it is this caller's turn.

        None once closed or withdrawn. `client` and `ticket` name the caller, for `withdraw`. `at_once`: tried now even
        if others wait, which are after something else.
        """
        if self._closed:
            return None
        if not self._queue or at_once:
            result = attempt()
            if result is not None:
                return result
        waiting = Waiting(asyncio.get_running_loop().create_future(), client, ticket, request)
        self._queue[waiting] = None
        if len(self._queue) > 1:
            self._pass_on()
        try:
            while await waiting.turn and waiting in self._queue and not self._closed:  # not withdrawn since its turn
                self._end_turn(waiting)
                waiting.turn = asyncio.get_running_loop().create_future()
                result = attempt()
                if result is not None:
                    return result
                if self._missed:
                    self._pass_on()
            return None
        finally:
            self._end_turn(waiting)
            self._queue.pop(waiting, None)
            if not self._closed:
                self._pass_on()

    def withdraw(self, client: Hashable, ticket: int | None = None) -> int:
        """Have the calls of `client` (that of one ticket, or all) give up their places. Returns how many they were."""
        leaving = [waiting for waiting in self._queue if waiting.client == client and ticket in (None, waiting.ticket)]
        for waiting in leaving:
            del self._queue[waiting]
            _wake(waiting, goes_on=False)
        return len(leaving)

    def wake_first(self, priority: Callable[[Any], Any] | None = None) -> None:
        """Let one caller try, unless another is about to. `priority`: of a request; the lowest is chosen, the first of
        several. None: the first of all."""
        self._missed = self._woken is not None
        if self._queue and not self._missed:
            first = itertools.islice(self._queue, LOOK if priority else 1)
            self._woken = min(first, key=lambda one: priority(one.request) if priority else 0)
            _wake(self._woken)

    def wake_all(self) -> None:
        for waiting in self._queue:
            _wake(waiting)

    def close(self) -> None:
        """Close the queue: all that wait, now or later, get None."""
        self._closed = True
        self.wake_all()

    def _end_turn(self, waiting: Waiting) -> None:
        if self._woken is waiting:
            self._woken = None


def _wake(waiting: Waiting, *, goes_on: bool = True) -> None:
    if not waiting.turn.done():
        waiting.turn.set_result(goes_on)
