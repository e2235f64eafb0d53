"""Handles a scheduler's SIGTERM in a run that has some time left (`faults.preemption_s`):

    SIGTERM ─▶ the step under way ends ─▶ a checkpoint ─▶ the end, as by Ctrl-C
       └────── the time is over, or a second SIGTERM ────▶

Schedulers and spot machines send it before they end a process.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

LEAVE_S = 60.0
"""Seconds for the ending to be delivered; far more than it needs."""


class Preemption:
    """Lifecycle: within `heeded`, `is_due` is true once no further step is to begin; then `leave`."""

    def __init__(self, time_s: float, tell: Callable[[str], None]) -> None:
        """`time_s`: seconds between the signal and the end; 0: SIGTERM does what it did before."""
        self.is_due = False
        self._time_s, self._tell = time_s, tell
        self._end: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Handle SIGTERM, if this process has a handler of its own for it, as the command line has."""
        before = signal.getsignal(signal.SIGTERM)
        if not (self._time_s and callable(before) and threading.current_thread() is threading.main_thread()):
            yield
            return
        self._end = lambda: before(signal.SIGTERM, None)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._hear, loop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)

    async def leave(self) -> NoReturn:
        """End now, by the handler that SIGTERM had before."""
        self._end()
        await asyncio.sleep(LEAVE_S)
        raise AssertionError("the way out of SIGTERM leads nowhere")

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.is_due:
            self._end()
            return
        self.is_due = True
        loop.call_later(self._time_s, self._end)
        self._tell(
            f"SIGTERM: a checkpoint follows the step that is under way, if there is time for both within "
            f"faults.preemption_s={self._time_s:g} s. Ctrl-C, or SIGTERM again, ends the run at once."
        )
