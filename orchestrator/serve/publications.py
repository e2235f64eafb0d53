"""Weights that engines have, each under a name that is given once: brought there when they are first sampled from, and
dropped when others need their place or when they are deleted."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from penstock.orchestrator.serve.backend import Backend
from penstock.orchestrator.serve.checkpoints import read_state
from penstock.workers.training_calls import AdapterState


class Publications:
    """Lifecycle: `name_of` weights before each sample, `release` after it; `drop` deleted ones. Weights come one after
    the other, and a sample from those that are there waits for no others."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend, self._most = backend, most
        self._names: dict[Path, str] = {}
        """Names on the engines by the file of their state, the one that has rested longest first."""
        self._arriving: dict[Path, asyncio.Task[None]] = {}
        self._using: Counter[str] = Counter()
        self._lock = asyncio.Lock()
        self._prefix, self._count = secrets.token_hex(4), 0

    async def name_of(self, file: Path, read: Callable[[Path], AdapterState] | None = None) -> str:
        """The name of weights on the engines, which keep them until `release`. Raises `DataError`, and what
        `Backend.publish` raises."""
        while (name := self._names.pop(file, "")) == "":
            if file not in self._arriving:
                task = self._arriving[file] = asyncio.create_task(self._publish(file, read or _weights))
                task.add_done_callback(lambda task: task.cancelled() or task.exception())  # where nobody waits any more
            await asyncio.shield(self._arriving[file])
        self._names[file] = name
        self._using[name] += 1
        return name

    async def release(self, name: str) -> None:
        """Note that a sample from these weights has ended."""
        self._using[name] -= 1
        if not self._using[name]:
            del self._using[name]
            if name not in self._names.values():
                await self._backend.drop_sampler(name)

    async def drop(self, file: Path) -> None:
        """Drop deleted weights, once nobody samples from them."""
        if file in self._arriving:
            await asyncio.wait([self._arriving[file]])
        name = self._names.pop(file, None)
        if name is not None and name not in self._using:
            await self._backend.drop_sampler(name)

    async def _publish(self, file: Path, read: Callable[[Path], AdapterState]) -> None:
        try:
            async with self._lock:
                await self._make_room()
                state = await asyncio.to_thread(read, file)
                self._count += 1
                name = f"{self._prefix}-{self._count}"
                await self._backend.publish(name, state)
                self._names[file] = name
        finally:
            del self._arriving[file]

    async def _make_room(self) -> None:
        while len(self._names) >= self._most:
            idle = next((file for file, name in self._names.items() if name not in self._using), None)
            if idle is None:
                return
            await self._backend.drop_sampler(self._names.pop(idle))


def _weights(file: Path) -> AdapterState:
    return read_state(file, with_optimizer=False)
