"""Tells every page that is open what has changed, from one look a second for all of them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio

from penstock.orchestrator.run_directory.json_lines import json_of

_LOG = logging.getLogger("penstock")
SHARE = 4
"""Least pause after a look, in multiples of its time: so many runs on a slow disk keep no core busy."""
BEHIND = 8
"""Most changes that wait for a slow page; then it is told to ask for everything anew."""
ANEW = {"anew": True}

Table = list[dict[str, Any]]


class Live:
    """Lifecycle: `run` until it is cancelled; `events` for each page."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._pages: set[asyncio.Queue[dict[str, Any]]] = set()
        self._new: set[asyncio.Queue[dict[str, Any]]] = set()
        """Queues of `_pages` that have not been told anything: what they have asked for may be older than a look."""
        self._lines: dict[str, dict[str, Any]] = {}

    async def run(self, look: Callable[[], Awaitable[Table]]) -> None:
        while True:
            started = time.monotonic()
            if self._pages:
                try:
                    self._tell({line["id"]: line for line in await look()})
                except OSError as error:
                    _LOG.warning("the runs cannot be looked at: %s", error)
            await asyncio.sleep(max(self._look_s, SHARE * (time.monotonic() - started)))

    async def events(self, ending: anyio.Event | None = None) -> AsyncIterator[dict[str, str]]:
        """Events `{"runs": {id: its line, or null}}` of runs that changed; `ANEW` first, after the first look.
        `ending`: set when the server ends."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._pages.add(queue)
        self._new.add(queue)
        ended = asyncio.create_task((ending or anyio.Event()).wait())
        try:
            while not ended.done():
                change = asyncio.create_task(queue.get())
                try:
                    await asyncio.wait({change, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if change.done():
                        yield _event(change.result())
                finally:
                    change.cancel()
        finally:
            ended.cancel()
            self._pages.discard(queue)
            self._new.discard(queue)

    def _tell(self, lines: dict[str, dict[str, Any]]) -> None:
        before, self._lines = self._lines, lines
        names = [name for name in before | lines if before.get(name) != lines.get(name)]
        for queue in self._pages:
            if queue in self._new:
                self._new.discard(queue)
                queue.put_nowait(ANEW)
            elif names and queue.qsize() < BEHIND:
                queue.put_nowait({"runs": {name: lines.get(name) for name in names}})
            elif names and queue.qsize() == BEHIND:
                queue.put_nowait(ANEW)


def _event(value: dict[str, Any]) -> dict[str, str]:
    return {"data": json_of(value).encode(errors="replace").decode()}
