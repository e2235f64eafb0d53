"""A thread that carries out what synchronous callers begin, each call with a future of its own."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.conf.errors import NotStarted
from penstock.workers.lifecycle.concurrent_tasks import cancel_all

T = TypeVar("T")
END_S = 10.0
"""Deadline for calls that are cancelled at the end."""


class LoopThread:
    """An event loop in a thread of its own, for callers without one. Lifecycle: `submit` from any thread, `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin. The future's `cancel` cancels the work. Raises `NotStarted` after `close`."""
        if not self._thread.is_alive():
            work.close()
            raise NotStarted("the loop's session or client is over: open another one.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is under way, and end the thread."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})

        concurrent.futures.wait([self.submit(end())], END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
