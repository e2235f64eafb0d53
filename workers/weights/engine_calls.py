"""Weights that are streamed from GPU to GPU: the messages, the calls of the sending rank to the engines, and how an
engine takes them.

    controller            trainer, on every rank              every engine
    once                  connect(engines, address) ────────▶ connect(init_info)
    each version          prepare(version) ─▶ delivery
                          send(version)                  ‖    load(delivery)
                            └─ part, part, …, end ──────────▶ deliver(part)

`prepare` costs nothing; `send` and the engines' `load` must run *at the same time*, since each waits for the other, and
before the trainer's next update changes the weights that are under way. `weight_senders.py` has the trainer's side.
Weights in shared memory (`publication/`) need none of this: an engine's `load` gets a `Publication`.

    LoopEngines, ActorEngines.deliver(part) ─▶ ReceivingEngine.deliver ─▶ Inbox.put ─┐
            ▲                                                                        │ part
            └─ answer, once it is loaded ─── the engine's `load` ◀─ Inbox.received ◀─┘

The senders call Ray actors, or engines in an event loop of the same process, and answer for all at once
(`ReceivingEngines`). The trainer's first rank gets `ActorEngines` when a run starts; `LoopEngines` is for straight-line
programs, benchmarks and tests.

In an engine, `deliver` puts a part into its `Inbox` and waits; `load`, running at the same time, takes it out and loads
it, and what loading raises is raised in `deliver` too. All of it runs in the engine's event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.conf.errors import DeadlineExceeded, PenstockError, WeightError, WorkerDied
from penstock.workers.protocols import Publication

Info = dict[str, Any]
"""Arguments of vLLM's weight-transfer backends, for the start or for a part of a version."""


@dataclass(frozen=True)
class StreamedVersion:
    """Announcement to an engine that a version is about to be sent to it, part by part."""

    version: int
    num_tensors: int
    """Tensors that must have arrived when the end is announced."""


Delivery = Publication | StreamedVersion
"""The argument of an engine's `load`: where a version is, or that it is streamed."""


@dataclass(frozen=True)
class StreamPart:
    """Some tensors of a version, or the notice that all have been sent."""

    version: int
    info: Info | None
    """vLLM's `update_info`: names, dtypes, shapes, and how to get at the values. None: the end."""


class ReceivingEngines(Protocol):
    """All engines of the run, as the sending rank calls them. A call goes to all and returns once all have answered;
    the first failure is raised as that engine's own error."""

    num_engines: int
    workers_per_engine: int
    """GPUs of each engine."""

    def connect(self, infos: Sequence[Info]) -> None:
        """Connect the engines; vLLM's `init_info`, one for each. Returns when they are ready to receive."""

    def deliver(self, part: StreamPart) -> None:
        """Deliver a part. Returns when every engine has loaded it; for the end, when every engine serves the
        version."""


class ReceivingEngine(Protocol):
    """The interface of an engine as the receiver of a stream; `VllmEngine` has it."""

    async def connect(self, init_info: Info) -> None: ...

    async def deliver(self, part: StreamPart) -> None: ...


class LoopEngines:
    """Engines that live in `loop`, reached from another thread."""

    def __init__(
        self, engines: Sequence[ReceivingEngine], loop: asyncio.AbstractEventLoop, workers_per_engine: int = 1
    ) -> None:
        self._engines, self._loop = engines, loop
        self.num_engines, self.workers_per_engine = len(engines), workers_per_engine

    def connect(self, infos: Sequence[Info]) -> None:
        self._all([engine.connect(info) for engine, info in zip(self._engines, infos, strict=True)])

    def deliver(self, part: StreamPart) -> None:
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

    def deliver(self, part: StreamPart) -> None:
        self._all([handle.deliver.remote(part) for _, handle in self._actors])

    def _all(self, calls: Sequence[Any]) -> None:
        """Wait for the calls in the order in which they end, so that one engine's failure is not hidden by another's
        silence."""
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

        names = {call: name for call, (name, _) in zip(calls, self._actors, strict=True)}
        waiting = list(calls)
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            try:
                ray.get(done)
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, PenstockError) else WorkerDied(f"{names[done]}: {cause}") from None
            except (RayActorError, OutOfMemoryError) as error:
                raise WorkerDied(f"{names[done]} has died while weights were sent to it: {error}") from None


class Inbox:
    """Lifecycle: `put` and `received` in any order, one stream at a time; `refuse` when a load failed."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: longest wait for the next part."""
        self._timeout_s = timeout_s
        self._parts: asyncio.Queue[tuple[StreamPart, asyncio.Future[None]]] = asyncio.Queue()
        self._refused: tuple[int, Exception] | None = None

    async def put(self, part: StreamPart) -> None:
        """Put a part in; returns when the engine is done with it. The part may come before the engine's `load` has
        begun, or after it has failed."""
        if self._refused is not None and self._refused[0] == part.version:
            raise self._refused[1]
        done = asyncio.get_running_loop().create_future()
        await self._parts.put((part, done))
        await done

    def refuse(self, version: int, error: Exception) -> None:
        """Answer all waiting and later parts of this version with the error that ended the load."""
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
            with self._answering(*await self._next(coming, num_tensors)) as part:
                phase = f"weight sync to version {coming.version}, phase receive"
                if part.version != coming.version:
                    raise WeightError(f"{phase}: the trainer sends version {part.version}.")
                if part.info is None and num_tensors != coming.num_tensors:
                    raise WeightError(
                        f"{phase}: the trainer announced {coming.num_tensors} tensors and ended after {num_tensors}."
                    )
                if part.info is None:
                    yield
                    return
                await load(part.info)
                num_tensors += len(part.info["names"])

    async def _next(self, coming: StreamedVersion, num_tensors: int) -> tuple[StreamPart, "asyncio.Future[None]"]:
        try:
            return await asyncio.wait_for(self._parts.get(), self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"weight sync to version {coming.version}, phase receive: nothing came from the trainer for "
                f"{self._timeout_s:g} s, after {num_tensors} of {coming.num_tensors} tensors. Its rank 0 has died or "
                "waits for another rank; see its error, or raise weights.phase_timeout_s."
            ) from None

    @contextmanager
    def _answering(self, part: StreamPart, done: "asyncio.Future[None]") -> Iterator[StreamPart]:
        """Answer the sender, whether the block succeeds or fails."""
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
