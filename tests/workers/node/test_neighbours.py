"""An agent tells what its neighbours say, and of nobody else anything."""

import asyncio
from typing import Any

from penstock.workers.node.neighbours import Neighbours


class Handle:
    """`progress` answers, fails, or never ends."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    @property
    def progress(self) -> "Handle":
        return self

    async def remote(self) -> Any:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_who_is_silent_fails_or_is_not_known_is_left_out() -> None:
    neighbours = Neighbours()
    neighbours.meet({"A": Handle("a"), "B": Handle(ValueError("b")), "C": Handle(None), "D": Handle("d")})
    found = asyncio.run(neighbours.ask("progress", ["A", "B", "C", "E"], 0.1))
    assert found == {"A": "a"}
    assert asyncio.run(neighbours.ask("progress", [], 0.1)) == {}


def test_those_that_were_met_last_are_asked() -> None:
    neighbours = Neighbours()
    neighbours.meet({"A": Handle("before"), "B": Handle("b")})
    neighbours.meet({"A": Handle("now")})
    assert asyncio.run(neighbours.ask("progress", ["A", "B"], 5.0)) == {"A": "now"}
