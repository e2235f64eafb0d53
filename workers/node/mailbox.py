"""Questions to the controller of a run, which is no actor and cannot be called: they wait here until the controller
takes them, and the caller waits for its answer. The mailbox is in the agent of the driver's node;
`orchestrator/membership/` has both ends.
"""

import asyncio
from typing import Any


class Mailbox:
    """Lifecycle: `ask` by a caller, `take` and `answer` by the controller, `close`."""

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
