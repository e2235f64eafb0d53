"""Tells the environments which engines there are: whenever one has joined, died, or taken another's place.

An engine is in its role only once it serves the newest weights (`faults/supervisor.py`), so an environment never
samples under older ones than the store allows. Used by `controller.py`.
"""

import asyncio
from typing import Any

from penstock.orchestrator.fleet.fleet import Fleet
from penstock.orchestrator.ray_calls import outcomes

LOOK_S = 0.1
"""Between two looks at who is there."""
TELL_S = 10.0
"""For an environment to answer; one that does not is told again."""


class EngineDirectory:
    """Lifecycle: `tell` once before they serve, then `run` until it is cancelled."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engines: list[tuple[str, Any]] = []
        self._version = 0
        """The list's version: engines are compared once a look, and not once for each environment."""
        self._told: dict[str, tuple[Any, int]] = {}
        """By environment: its handle, and the version that it knows."""

    async def run(self) -> None:
        while True:
            await self.tell()
            await asyncio.sleep(LOOK_S)

    async def tell(self) -> None:
        """Those who do not know yet."""
        engines = self._fleet.role("rollout")
        if engines != self._engines:
            self._engines, self._version = engines, self._version + 1
        version, environments = self._version, self._fleet.role("environment")
        behind = [(name, handle) for name, handle in environments if self._told.get(name) != (handle, version)]
        calls = [(name, handle.engines.remote(engines)) for name, handle in behind]
        heard = await outcomes(calls, phase="tell the engines", timeout_s=TELL_S) if calls else []
        for (name, handle), answer in zip(behind, heard, strict=True):
            if not isinstance(answer, Exception):
                self._told[name] = (handle, version)
