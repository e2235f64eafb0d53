"""A callback that any thread and any finalizer may ask for: it runs on the event loop, once for all that ask meanwhile.

It serves the ends of arrays, which are collected wherever their last reader is.
"""

import asyncio
import contextlib
from collections.abc import Callable

SOON_S = 0.05
"""Delay in seconds. What ends with the next call anyway is said by that call; a lease's arrays end together."""


class Soon:
    """A callback for the event loop: `soon = Soon(loop, callback)`, then `soon()` whenever there is something to do;
    nothing after the loop has closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._is_due = False

    def __call__(self) -> None:
        if self._is_due:
            return
        self._is_due = True
        with contextlib.suppress(RuntimeError):  # the loop has closed
            # What asyncio itself calls from finalizers: it takes no lock.
            self._loop.call_soon_threadsafe(self._loop.call_later, SOON_S, self._run)

    def _run(self) -> None:
        self._is_due = False  # first: what ends from now on is due again
        self._callback()
