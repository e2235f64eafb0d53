"""The calls of the sending rank to the engines: as Ray actors, or in an event loop of the same process.

Both answer for all engines at once (`transport.Engines`). The trainer's first rank gets `ActorEngines` when a run
starts; `LoopEngines` is for straight-line programs, benchmarks and tests.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from penstock.conf.errors import PenstockError, WorkerDied
from penstock.workers.weights.transport import Info, Part


class ReceivingEngine(Protocol):
    """The interface of an engine as the receiver of a stream; `VllmEngine` has it."""

    async def connect(self, init_info: Info) -> None: ...

    async def deliver(self, part: Part) -> None: ...


class LoopEngines:
    """Engines that live in `loop`, reached from another thread."""

    def __init__(
        self, engines: Sequence[ReceivingEngine], loop: asyncio.AbstractEventLoop, workers_per_engine: int = 1
    ) -> None:
        self._engines, self._loop = engines, loop
        self.num_engines, self.workers_per_engine = len(engines), workers_per_engine

    def connect(self, infos: Sequence[Info]) -> None:
        self._all([engine.connect(info) for engine, info in zip(self._engines, infos, strict=True)])

    def deliver(self, part: Part) -> None:
        self._all([engine.deliver(part) for engine in self._engines])

    def _all(self, calls: Sequence[Awaitable[None]]) -> None:
        async def together() -> None:
            await asyncio.gather(*calls)

        asyncio.run_coroutine_threadsafe(together(), self._loop).result()


class ActorEngines:
    """Rollout actors, by name and handle. Can be sent through Ray. Waits without a deadline of its own: the sender is
    watched."""

    def __init__(self, actors: Sequence[tuple[str, Any]], workers_per_engine: int = 1) -> None:
        self._actors = list(actors)
        self.num_engines, self.workers_per_engine = len(self._actors), workers_per_engine

    def connect(self, infos: Sequence[Info]) -> None:
        self._all([handle.connect.remote(info) for (_, handle), info in zip(self._actors, infos, strict=True)])

    def deliver(self, part: Part) -> None:
        self._all([handle.deliver.remote(part) for _, handle in self._actors])

    def _all(self, calls: Sequence[Any]) -> None:
        """Wait for the calls in the order in which they end, so that one engine's failure is not hidden by another's
        silence."""
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        names = {call: name for call, (name, _) in zip(calls, self._actors, strict=True)}
        waiting = list(calls)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(done)
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, PenstockError) else WorkerDied(f"{names[done]}: {cause}") from None
            except RayActorError as error:
                raise WorkerDied(f"{names[done]} has died while weights were sent to it: {error}") from None
