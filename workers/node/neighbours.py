"""The actors of a node, asked by its agent for the controller: one answer for all of them. The controller itself asks
actors that are not in the answer (`orchestrator/cluster/fleet/roster.py`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any


class Neighbours:
    """Lifecycle: `meet` the actors, again whenever they change; `ask` any of them."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def meet(self, handles: Mapping[str, Any]) -> None:
        """Set all actors that are there now, by name."""
        self._handles = dict(handles)

    async def ask(self, method: str, names: Iterable[str], timeout_s: float) -> dict[str, Any]:
        """Call actors without arguments; return their answers. An actor that does not answer in time, fails, or is not
        known is left out; the controller learns the reason when it asks itself."""
        known = {name: handle for name in names if (handle := self._handles.get(name)) is not None}
        calls = {name: asyncio.create_task(_said(handle, method)) for name, handle in known.items()}
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
        try:
            return {name: call.result() for name, call in calls.items() if call.done() and call.exception() is None}
        finally:
            for call in calls.values():
                call.cancel()


async def _said(handle: Any, method: str) -> Any:
    return await getattr(handle, method).remote()
