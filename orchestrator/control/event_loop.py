"""The event loop of a run, and the threads that its blocking calls have: files, object stores, the lock of a directory.

A file system that does not answer keeps its thread for as long as it likes. Such a thread keeps neither a run from
returning to its checkpoint nor a command from ending: both wait `LEAVE_S` for it. What a thread does after that must
harm nobody: `checkpointing/saving.py` has its part in this.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

LEAVE_S = 15.0
"""Seconds that the end of a loop waits for threads: what a write to a slow disk takes, and not what a dead one does."""
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run` does, and end without threads that hang."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(DaemonThreads())
        return runner.run(main)


class DaemonThreads(ThreadPoolExecutor):
    """Threads of a loop, one for each call: few are under way at a time. No process waits for them at its end.

    It is a `ThreadPoolExecutor` because a loop takes no other as its own."""

    def __init__(self) -> None:
        super().__init__(1)
        self._calls: set[threading.Thread] = set()

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> "Future[T]":
        future: Future[T] = Future()
        thread = threading.Thread(
            target=self._run, args=(future, partial(function, *arguments, **named)), name="run", daemon=True
        )
        self._calls.add(thread)
        thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for what is under way, for `LEAVE_S` at most. A second time changes nothing."""
        super().shutdown(wait=False)
        deadline = time.monotonic() + LEAVE_S if wait else 0.0
        for thread in list(self._calls):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, future: "Future[T]", call: Callable[[], T]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - its caller is told
                future.set_exception(error)
        self._calls.discard(threading.current_thread())
