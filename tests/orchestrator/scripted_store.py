"""A store that can die in the process that it is in, and what a fleet does then."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from penstock.conf.errors import PartnerGone
from penstock.conf.run import RunConfig
from penstock.store.service.store import Store
from penstock.store.service.wire import CALLS, MANY


class MortalStore(Store):
    """Once it is dead every call fails, those that wait too, as they do over a connection that ends."""

    _death: "asyncio.Future[None] | None" = None

    def die(self) -> None:
        if not self._deaths().done():
            self._deaths().set_result(None)

    def _deaths(self) -> "asyncio.Future[None]":
        if self._death is None:
            self._death = asyncio.get_running_loop().create_future()
        return self._death

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        return method if name not in (*CALLS, MANY) else lambda *arguments: self._mortal(method(*arguments))

    async def _mortal(self, call: Awaitable[Any]) -> Any:
        """The result of a call, or the news of the death."""
        death, calling = self._deaths(), asyncio.ensure_future(call)
        try:
            await asyncio.wait({death, calling}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise PartnerGone("the store's process is gone")
            return calling.result()
        finally:
            calling.cancel()


class ScriptedStoreProcess:
    """Stands where a `StoreProcess` does. `made`: a store that goes on from a snapshot; `told`: hears which is there
    now."""

    def __init__(
        self, config: RunConfig, made: Callable[[str | None], Store], told: Callable[[Store], None],
        pause: Callable[[float], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._place = Path(config.output_dir) / "scratch"
        self._made, self._told, self._pause = made, told, pause
        self._num_lost = 0

    async def replace(self, snapshot: str | None, timeout_s: float) -> None:
        self._num_lost += 1
        await self._pause(5.0)
        self._told(self._made(snapshot))

    async def scratch(self, timeout_s: float) -> str:
        return str(self._place / str(self._num_lost))  # threads of a dead one may still write
