"""The actors of a node, asked by its agent in the controller's place: one answer for all of them. Used by `actor.py`;
`orchestrator/fleet/roll_call.py` asks, and whoever is not in the answer is asked by the controller itself.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any


class Neighbours:
    """Lifecycle: `meet` them, again whenever others are there; `ask` any of them."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def meet(self, handles: Mapping[str, Any]) -> None:
        """All that are there now, by name."""
        self._handles = dict(handles)

    async def ask(self, method: str, names: Iterable[str], timeout_s: float) -> dict[str, Any]:
        """What each of these says to a call without arguments. Who says nothing in time, fails, or is not known is left
        out: why, the controller hears when it asks itself."""
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
