"""A number is to be found in few guesses; each is answered with where it lies. An environment of twenty lines."""

import itertools
import random
from collections.abc import Iterator

from penstock.workers.environments.context import Context
from penstock.workers.environments.task import Task

HIGHEST = 31


class Guess:
    def __init__(self, guesses: int = 5) -> None:
        self.guesses = guesses

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        return (Task(str(index), index, {"number": draws.randint(1, HIGHEST)}) for index in itertools.count())

    async def run(self, task: Task, ctx: Context) -> None:
        number = task.data["number"]
        messages = [{"role": "user", "content": f"1-{HIGHEST}?"}]
        for _ in range(self.guesses):
            turn = await ctx.sample(messages)
            guess = int(turn.text) if turn.text.isdecimal() else 0
            if guess == number:
                return ctx.reward(1.0)
            answer = "what?" if not 1 <= guess <= HIGHEST else "higher" if guess < number else "lower"
            messages += [turn.message, {"role": "user", "content": answer}]
