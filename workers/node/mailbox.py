"""Questions to the controller of a run, which is no actor and cannot be called: they wait here until it takes them, and
who asked waits for its answer. In the agent of the driver's node; `orchestrator/elastic/` has both ends.
"""

import asyncio
from typing import Any


class Mailbox:
    """Lifecycle: `ask` by whoever wants something, `take` and `answer` by the one who can do it, `close`."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self._taking: asyncio.Task[tuple[int, Any]] | None = None

    async def ask(self, question: Any) -> Any:
        """The answer. None: it was closed before there was one."""
        self._asked += 1
        number, answer = self._asked, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._waiting.put_nowait((number, question))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def take(self) -> tuple[int, Any]:
        """The next question and its number. Whoever waits for one already does so no more: another process drives the
        run."""
        if self._taking is not None:
            self._taking.cancel()
        self._taking = taking = asyncio.create_task(self._waiting.get())
        return await taking

    def answer(self, number: int, answer: Any) -> None:
        """Whoever asked may have gone."""
        if (asking := self._answers.get(number)) is not None and not asking.done():
            asking.set_result(answer)

    def close(self) -> None:
        for asking in self._answers.values():
            if not asking.done():
                asking.set_result(None)
