"""Sums too long to do in the head, and a calculator that can be called. An environment with a tool."""

import itertools
import random
from collections.abc import Iterator

from penstock import Context, Message, Task


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Sums:
    def __init__(self, digits: int = 5) -> None:
        self.low, self.high = 10 ** (digits - 1), 10**digits - 1

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        for index in itertools.count():
            yield Task(
                str(index), index, {"a": draws.randint(self.low, self.high), "b": draws.randint(self.low, self.high)}
            )

    async def run(self, task: Task, ctx: Context) -> None:
        a, b = task.data["a"], task.data["b"]
        messages: list[Message] = [{"role": "user", "content": f"{a}+{b}"}]
        turn = await ctx.sample(messages, [add])
        while turn.calls or turn.problem:
            messages += [turn.message, *await ctx.use_tools(turn, [add])]
            turn = await ctx.sample(messages, [add])
        ctx.reward(float(turn.answer == str(a + b)))
