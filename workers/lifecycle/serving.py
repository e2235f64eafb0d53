"""The service of an actor for a store, until it closes, and the base of the actors that serve one. A `run` with another
store replaces the previous one; with the same store, it is a second call for the same work, by another process that
drives the run.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.network.proxies import ask_directly
from penstock.store.client.client import StoreClient
from penstock.workers.lifecycle.progress import SERVING, Phases
from penstock.workers.machine.processes import ProcessId, register


class Serving:
    """Lifecycle: `run` any number of times. One task serves at a time, with a client of its own.

    serving = Serving(worker.run)
    await serving.run(store)        # until the store closes
    await serving.run(store)        # meanwhile: returns with the first call
    await serving.run(other_store)  # meanwhile: the first call returns once its tasks have ended, then this one serves
    await serving.drain(30.0)       # meanwhile: finish what is held, then `run` returns
    """

    def __init__(self, serve: Callable[[StoreClient], Awaitable[None]]) -> None:
        self._serve = serve
        self._running: asyncio.Task[None] | None = None
        self._store: Any = None
        self._client: StoreClient | None = None
        """Store and client of the task that serves."""
        self._turn = asyncio.Lock()

    async def run(self, store: Any) -> None:
        """Serve the store. Raises what serving raises."""
        mine = self._running
        if mine is None or mine.done() or store != self._store:
            if mine is not None:
                mine.cancel()
            self._running = mine = asyncio.create_task(self._run(store))
            self._store = store
        try:
            await mine
        except asyncio.CancelledError:
            if mine is self._running:  # it was this call that was cancelled
                raise

    async def drain(self, timeout_s: float) -> None:
        """Take no more leases, and finish those that are held; after `timeout_s` give the rest back. Then `run` has
        returned. Does nothing where no task serves."""
        running, self._running = self._running, None
        if running is None:
            return
        if self._client is not None:
            await self._client.retire()
            await asyncio.wait([running], timeout=timeout_s)
        running.cancel()
        await asyncio.wait([running])

    async def _run(self, store: Any) -> None:
        async with self._turn:
            self._client = client = StoreClient(store)
            try:
                await self._serve(client)
            finally:
                self._client = None
                await client.leave()


class ServingActor:
    """Base of the Ray shells that serve a store: the calls that the controller makes to each of them.

    Lifecycle: `start`, then `run` until the store closes; `run` with another store ends the previous one; `close`.
    """

    def __init__(self, name: str) -> None:
        ask_directly()
        self._name, self._phases = name, Phases()
        self._serving = Serving(self._serve)

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> None:
        """Load what it works with; from then on it serves."""
        self._phases.enter(SERVING)

    async def run(self, store: Any) -> None:
        """Serve the store until it closes."""
        await self._serving.run(store)

    async def _serve(self, store: StoreClient) -> None:
        """Serve the store with this client until it closes."""
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> None:
        """Take no more work and finish what is here; what is not done after `timeout_s` goes back. Then `run` has
        returned."""
        await self._serving.drain(timeout_s)

    async def process(self, stacks: str) -> ProcessId:
        """Return the identity of this process. From now on a signal writes its stacks below `stacks`."""
        return register(stacks)

    async def close(self) -> None:
        """End nothing, unless the actor has something to end: there is the same call for every actor."""
