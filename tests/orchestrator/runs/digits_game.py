"""An environment of two turns: say something, hear how many digits were in it, say more."""

import asyncio
from collections.abc import Iterator
from typing import Any

from penstock.workers.agents.environment import Task


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


class Digits:
    def __init__(self, temperature: float | None = None) -> None:
        """`temperature`: of the second turn, other than the run's."""
        self._options = [{}, {} if temperature is None else {"temperature": temperature}]

    def tasks(self, seed: int) -> Iterator[Task]:
        return (Task(str(index), index, {"number": seed + index * index}) for index in range(64))

    async def run(self, task: Task, ctx: Any) -> None:
        messages = [{"role": "user", "content": f"{task.data['number']} is a number"}]
        for options in self._options:
            turn = await ctx.sample(messages, **options)
            share = share_of_digits(turn.message["content"])
            ctx.reward(share, turn)
            messages += [turn.message, {"role": "user", "content": f"{share:.2f}"}]


class SlowDigits(Digits):
    """Some tasks take seconds between their turns."""

    async def run(self, task: Task, ctx: Any) -> None:
        messages = [{"role": "user", "content": f"{task.data['number']} is a number"}]
        turn = await ctx.sample(messages)
        if int(task.id) % 8 == 0:
            await asyncio.sleep(2.0)
        await ctx.sample([*messages, turn.message, {"role": "user", "content": "more"}])
        ctx.reward(share_of_digits(turn.message["content"]))
