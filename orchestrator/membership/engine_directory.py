"""Tells the environments which engines there are: whenever one has joined, died, or taken another's place.

An engine is in its role only once it serves the newest weights (`membership/supervisor.py`), so an environment never
samples under older ones than the store allows.
"""

import asyncio
from typing import Any

from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, outcomes

LOOK_S = 0.1
"""Seconds between two looks at which engines there are."""
TELL_S = 10.0
"""Deadline for an environment to answer; one that does not is told again."""


class EngineDirectory:
    """Lifecycle: `tell` once before the environments serve, then `run` until it is cancelled."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engines: Handles = []
        self._version = 0
        """The list's version: engines are compared once a look, and not once for each environment."""
        self._told: dict[str, tuple[Any, int]] = {}
        """Handle of each environment, and the version that it knows, by name."""

    async def run(self) -> None:
        while True:
            await self.tell()
            await asyncio.sleep(LOOK_S)

    async def tell(self) -> None:
        """Tell the environments that do not know the present engines yet."""
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
