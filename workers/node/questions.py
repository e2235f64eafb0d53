"""Questions that pass through a node's agent, to the controller of a run and from it.

    caller ─ ask ─▶ Mailbox ◀─ take, answer ─ controller         controller ─▶ NodeActors.ask ─▶ actors of the node

The controller is no actor and cannot be called: questions to it wait in the agent of the driver's node until it takes
them, and the caller waits for its answer; `orchestrator/membership/` has both ends. It asks the actors of a node
through the agent there, which gives one answer for all of them. Actors that are not in the answer it asks itself
(`orchestrator/cluster/fleet/roll_call.py`).
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any


class Mailbox:
    """Questions to the controller. Lifecycle: `ask` by a caller, `take` and `answer` by the controller, `close`."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self._taking: asyncio.Task[tuple[int, Any]] | None = None

    async def ask(self, question: Any) -> Any:
        """Ask; return the answer. None: the mailbox was closed before there was one."""
        self._asked += 1
        number, answer = self._asked, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._waiting.put_nowait((number, question))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def take(self) -> tuple[int, Any]:
        """Take the next question and its number. An earlier call that still waits is cancelled: another process drives
        the run now."""
        if self._taking is not None:
            self._taking.cancel()
        self._taking = taking = asyncio.create_task(self._waiting.get())
        return await taking

    def answer(self, number: int, answer: Any) -> None:
        """Answer a question. Its caller may be gone."""
        if (asking := self._answers.get(number)) is not None and not asking.done():
            asking.set_result(answer)

    def close(self) -> None:
        for asking in self._answers.values():
            if not asking.done():
                asking.set_result(None)


class NodeActors:
    """The actors of a node. Lifecycle: `set` them, again whenever they change; `ask` any of them."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def set(self, handles: Mapping[str, Any]) -> None:
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
