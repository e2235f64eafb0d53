"""Calls that need not go alone: those made while a message is under way are sent together in the next one.

Under load a worker thus pays one round trip for many writes, renewals and releases; without load each goes at once.
"""

import asyncio
from typing import Any

from penstock.store.client.links import Link

Outgoing = tuple[str, tuple[Any, ...], "asyncio.Future[Any]"]


class CallBatcher:
    """Calls of one client to one store, in the order in which they were made; at most one message is under way."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[Outgoing] = []
        self._flight: asyncio.Task[Any] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of that method of the store, which must be one that does not wait. Raises what it raises."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((method, arguments, future))
        if self._flight is None:
            self._take_off()
        return await future

    def _take_off(self) -> None:
        sent, self._waiting = self._waiting, []
        calls = [(method, arguments) for method, arguments, _ in sent]
        flight = asyncio.get_running_loop().create_task(self._link.call("many", calls))
        flight.add_done_callback(lambda flight: self._landed(sent, flight))
        self._flight = flight

    def _landed(self, sent: list[Outgoing], flight: "asyncio.Task[Any]") -> None:
        """Give every caller its result: the message has been answered, or the store's process is gone."""
        self._flight = None
        if self._waiting:
            self._take_off()
        failure = asyncio.CancelledError() if flight.cancelled() else flight.exception()
        results = [(None, failure)] * len(sent) if failure is not None else flight.result()
        for (_, _, future), (value, error) in zip(sent, results, strict=True):
            if future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
