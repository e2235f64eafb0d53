"""An engine's side of a stream: parts of a version on their way from the trainer's first rank.

The trainer's call `deliver` puts a part in and waits; the engine's `load`, running at the same time, takes it out and
loads it, and what loading raises is raised in `deliver` too. All of it runs in the engine's event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from penstock.conf.errors import DeadlineExceeded, WeightError
from penstock.workers.weights.transport import Info, Part, StreamedVersion


class Inbox:
    """Lifecycle: `put` and `received` in any order, one stream at a time; `refuse` when a load failed."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: longest wait for the next part."""
        self._timeout_s = timeout_s
        self._parts: asyncio.Queue[tuple[Part, asyncio.Future[None]]] = asyncio.Queue()
        self._refused: tuple[int, Exception] | None = None

    async def put(self, part: Part) -> None:
        """Put a part in; returns when the engine is done with it. The part may come before the engine's `load` has
        begun, or after it has failed."""
        if self._refused is not None and self._refused[0] == part.version:
            raise self._refused[1]
        done = asyncio.get_running_loop().create_future()
        await self._parts.put((part, done))
        await done

    def refuse(self, version: int, error: Exception) -> None:
        """Answer every part that waits, and those of this version that still come, with the error that ended the
        load."""
        self._refused = version, error
        while not self._parts.empty():
            _, done = self._parts.get_nowait()
            if not done.done():
                done.set_exception(error)

    @asynccontextmanager
    async def received(self, coming: StreamedVersion, load: Callable[[Info], Awaitable[None]]) -> AsyncIterator[None]:
        """Load every part of the version; within the block all are loaded. The sender gets its answer when the block
        has been left, with the error if it was left by one.

        Raises `DeadlineExceeded` when nothing comes from the trainer, `WeightError` for a part of another version or an
        end that comes too early or too late.
        """
        num_tensors = 0
        while True:
            with self._answered(*await self._next(coming, num_tensors)) as part:
                _check(part, coming, num_tensors)
                if part.info is None:
                    yield
                    return
                await load(part.info)
                num_tensors += len(part.info["names"])

    async def _next(self, coming: StreamedVersion, num_tensors: int) -> tuple[Part, "asyncio.Future[None]"]:
        try:
            return await asyncio.wait_for(self._parts.get(), self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"weight sync to version {coming.version}, phase receive: nothing came from the trainer for "
                f"{self._timeout_s:g} s, after {num_tensors} of {coming.num_tensors} tensors. Its rank 0 has died or "
                "waits for another rank; see its error, or raise weights.phase_timeout_s."
            ) from None

    @contextmanager
    def _answered(self, part: Part, done: "asyncio.Future[None]") -> Iterator[Part]:
        """Answer the sender whatever happens to its part."""
        failure: Exception | None = WeightError(f"weight sync to version {part.version}: the engine gave it up.")
        try:
            yield part
            failure = None
        except Exception as error:
            failure = error
            raise
        finally:
            if not done.done():
                done.set_result(None) if failure is None else done.set_exception(failure)


def _check(part: Part, coming: StreamedVersion, num_tensors: int) -> None:
    phase = f"weight sync to version {coming.version}, phase receive"
    if part.version != coming.version:
        raise WeightError(f"{phase}: the trainer sends version {part.version}.")
    if part.info is None and num_tensors != coming.num_tensors:
        raise WeightError(f"{phase}: the trainer announced {coming.num_tensors} tensors and ended after {num_tensors}.")
