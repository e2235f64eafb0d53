"""Threads for tools that are plain functions: so many at a time, and none is lost to one that hangs.

A call waits for its turn, then has a thread of its own, and its time begins. A call whose time is over gives up its
place at once. Its thread is asked to end; a thread that waits outside of Python notices that late or never.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from penstock.conf.errors import ResourceError
from penstock.workers.lifecycle.contained import CodeEnded, TookTooLong

MAX_LEFT = 1000
"""Largest number of threads that hang; each costs memory, and the system's number of threads is limited too."""


class ToolThreads:
    """Lifecycle: `call` any number of times, also concurrently. Nothing has to be closed: threads end with the
    process."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: calls that run at a time."""
        self._places = asyncio.Semaphore(num_threads)
        self._left: list[threading.Thread] = []

    @property
    def num_left(self) -> int:
        """Number of threads that were given up and have not ended."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        return len(self._left)

    async def call(self, function: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Run a function in a thread; return or raise what it does. `timeout_s`: from where it begins to run; None:
        until the caller is cancelled. Raises `TookTooLong`, `CodeEnded`; `ResourceError` where too many hang for
        good."""
        async with self._places:
            if self.num_left >= MAX_LEFT:
                raise ResourceError(
                    f"{MAX_LEFT:,} calls of tools hang in threads, which nobody can end. Give the tool a timeout of "
                    "its own, make it async, or have it run in a process or in ctx.sandbox()."
                )
            done = asyncio.get_running_loop().create_future()
            arguments = (_run, function, asyncio.get_running_loop(), done)
            thread = threading.Thread(target=copy_context().run, args=arguments, name="tool", daemon=True)
            thread.start()
            try:
                await asyncio.wait([done], timeout=timeout_s)
            finally:
                if not done.done():
                    done.cancel()
                    self._leave(thread)
            if done.cancelled():
                raise TookTooLong(f"it took longer than {timeout_s:g} s")
            return done.result()

    def _leave(self, thread: threading.Thread) -> None:
        """Ask a thread to end. A loop in Python ends by this; a wait in C goes on until it returns."""
        self._left.append(thread)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


def _run(function: Callable[[], Any], loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Any]") -> None:
    value: Any = None
    failure: Exception | None = None
    try:
        value = function()
    except StopIteration as error:  # no future takes it
        failure = RuntimeError(f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever it is, its caller is told
        failure = error
    except BaseException as error:  # noqa: BLE001 - nor does it end the loop
        failure = CodeEnded(f"{type(error).__name__}: {error}")
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_tell, done, value, failure)


def _tell(done: "asyncio.Future[Any]", value: Any, failure: Exception | None) -> None:
    if done.done():
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(value)
