"""The process that drives a run: its event loop, the threads of its blocking calls, and the signal that ends it.

A file system that does not answer keeps its thread for as long as it likes: files, object stores, the lock of a
directory. Such a thread keeps neither a run from returning to its checkpoint nor a command from ending: both wait
`LEAVE_S` for it. What a thread does after that must harm nobody: `checkpointing/checkpoints.py` has its part in this.

Schedulers and spot machines send SIGTERM before they end a process, a terminal that is closed SIGHUP. A run that has
some time left (`faults.preemption_s`) takes a checkpoint:

    SIGTERM ─▶ the step under way ends ─▶ a checkpoint ─▶ the end, as by Ctrl-C
       └────── the time is over, or a second SIGTERM ────▶
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

from penstock.orchestrator.signals import ENDING, Repeats

LEAVE_S = 15.0
"""Seconds that the end of a loop waits for threads: what a write to a slow disk takes, and not what a dead one does."""
END_S = 60.0
"""Seconds for the ending by a signal to be delivered; far more than it needs."""
CHECKS_S = 0.5
"""Seconds between two checks of what the work needs."""
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], check: Callable[[], None] = lambda: None) -> T:
    """Run as `asyncio.run` does, and end without threads that hang. `check`: raises what ends the work, asked again and
    again. An interrupt is raised as one, whatever else fails with it."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(DaemonThreads())
        return runner.run(_checked(main, check))


async def _checked(main: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
    working, checking = asyncio.ensure_future(main), asyncio.ensure_future(_check(check))
    try:
        done, _ = await asyncio.wait([working, checking], return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        checking.cancel()
        await asyncio.gather(working, checking, return_exceptions=True)
    return await (working if working in done else checking)


async def _check(check: Callable[[], None]) -> NoReturn:
    while True:
        await asyncio.sleep(CHECKS_S)
        check()


@contextlib.contextmanager
def own_event_loop() -> Iterator[None]:
    """Let this thread run event loops of its own within a notebook's cell, which runs within the kernel's. Also a
    decorator."""
    outer = asyncio._get_running_loop()
    task = asyncio.current_task() if outer is not None else None
    if outer is None:
        yield
        return
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        asyncio.set_event_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)


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
            except BaseException as error:  # noqa: BLE001 - its caller gets it
                future.set_exception(error)
        self._calls.discard(threading.current_thread())


class Preemption:
    """Handler of a scheduler's SIGTERM, and of SIGHUP. Lifecycle: within `handle_signals`, `is_due` is true once no
    further step is to begin; then `leave`."""

    def __init__(self, time_s: float, tell: Callable[[str], None]) -> None:
        """`time_s`: seconds between the signal and the end; 0: the signals do what they did before."""
        self.is_due = False
        self._time_s, self._tell = time_s, tell
        self._repeats = Repeats()
        self._end: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the signals that this process has handlers of its own for, as the command line has."""
        before = {number: signal.getsignal(number) for number in ENDING}
        own = {number: handler for number, handler in before.items() if callable(handler)}
        if not (self._time_s and own and threading.current_thread() is threading.main_thread()):
            yield
            return
        loop, (first, way_out) = asyncio.get_running_loop(), next(iter(own.items()))
        self._end = lambda: way_out(first, None)
        for number in own:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._hear, loop))
        try:
            yield
        finally:
            for number, handler in own.items():
                signal.signal(number, handler)

    async def leave(self) -> NoReturn:
        """End now, by the handler that the signal had before."""
        self._end()
        await asyncio.sleep(END_S)
        raise AssertionError("the way out of SIGTERM leads nowhere")

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._repeats():
            return
        if self.is_due:
            self._end()
            return
        self.is_due = True
        loop.call_later(self._time_s, self._end)
        self._tell(
            f"signalled to end: a checkpoint follows the current step, if both fit into "
            f"faults.preemption_s={self._time_s:g} s. Ctrl-C, or SIGTERM again, ends the run at once."
        )
