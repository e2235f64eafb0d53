"""The sandbox for callers without an event loop: rewards, which run in processes of their own."""

import asyncio
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.workers.sandbox.limits import Limits
from penstock.workers.sandbox.outcome import Outcome, Result
from penstock.workers.sandbox.sandbox import Sandbox


class BlockingSandbox:
    """A sandbox with one fence, used from one thread, with `Sandbox`'s calls. It ends with this process, however that
    ends."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._loop = asyncio.new_event_loop()  # not the thread's: the reward may be called by code that has one
        self._sandbox = Sandbox(limits, num_workers=1)
        self._end = weakref.finalize(self, self._sandbox.close)  # at this process's exit, if not before

    def start(self) -> None:
        """Start the fence. Raises `SandboxUnavailable` if code cannot be fenced in here."""
        self._loop.run_until_complete(self._sandbox.start())

    @property
    def held(self) -> str:
        """A text that says which limits hold here, once the fence has started."""
        return self._sandbox.held

    def close(self) -> None:
        self._end()
        self._loop.close()

    def run_python(self, source: str, stdin: str | bytes = b"", wall_s: float | None = None) -> Outcome:
        return self._loop.run_until_complete(self._sandbox.run_python(source, stdin, wall_s))

    def call(
        self, source: str, function: str, calls: Sequence[Sequence[Any]], wall_s: float | None = None
    ) -> list[Result]:
        return self._loop.run_until_complete(self._sandbox.call(source, function, calls, wall_s))


def tried_here(all_limits: Iterable[Limits]) -> str:
    """A text that says what holds on this machine, once fences with each of these limits have been started, tried from
    inside and closed. Raises `SandboxUnavailable`."""
    held: list[str] = []
    for limits in all_limits:
        fence = BlockingSandbox(limits)
        try:
            fence.start()
            held.append(fence.held)
        finally:
            fence.close()
    return f"tried from inside, and no hole found; {'; '.join(dict.fromkeys(held))}"
