"""What a scheduler's SIGTERM means to a run that has some time left (`faults.preemption_s`):

    SIGTERM ─▶ the step under way ends ─▶ a checkpoint ─▶ the way out of Ctrl-C
       └────── the time is over, or a second SIGTERM ────▶

Schedulers and machines that are sold by the moment say so before they end a process. Entered by `controller.py`.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

LEAVE_S = 60.0
"""For the way out to reach whoever takes it; far more than it needs."""


class Preemption:
    """Lifecycle: within `heeded`, `is_due` says that no further step is to begin; then `leave`."""

    def __init__(self, time_s: float, tell: Callable[[str], None]) -> None:
        """`time_s`: between the signal and the end; 0: SIGTERM does what it did before."""
        self.is_due = False
        self._time_s, self._tell = time_s, tell
        self._end: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def heeded(self) -> Iterator[None]:
        """Where this process has a way out at SIGTERM, as the command line has."""
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
        """Take the way out now."""
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
