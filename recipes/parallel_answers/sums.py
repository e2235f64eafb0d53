"""Sums, answered several times in parallel by a policy that then reads its answers and gives the last one."""

import asyncio
import itertools
import random
from collections.abc import Iterator

from penstock import Context, Task


class Sums:
    def __init__(self, width: int = 4) -> None:
        """Set the `width`: the number of answers that the last turn reads. 0: there is one turn alone."""
        self.width = width

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        for index in itertools.count():
            yield Task(str(index), index, {"a": draws.randint(10, 49), "b": draws.randint(10, 49)})

    async def run(self, task: Task, ctx: Context) -> None:
        question = f"{task.data['a']}+{task.data['b']}"
        asked = [{"role": "user", "content": question}]
        # At a temperature, so that the answers differ in evaluation, too, which is greedy.
        turns = await asyncio.gather(*[ctx.sample(asked, temperature=1.0) for _ in range(self.width)])
        answers = [turn.answer for turn in turns]
        last = await ctx.sample([{"role": "user", "content": " ".join([question, *answers])}])
        ctx.reward(float(last.answer == str(task.data["a"] + task.data["b"])))
