"""A game: find a number in few guesses, of which each is answered with where it lies. An environment of twenty
lines."""

import itertools
import random
from collections.abc import Iterator

from penstock import Context, Message, Task

HIGHEST = 15


class Guess:
    def __init__(self, guesses: int = 4) -> None:
        self.guesses = guesses

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        return (Task(str(index), index, {"number": draws.randint(1, HIGHEST)}) for index in itertools.count())

    async def run(self, task: Task, ctx: Context) -> None:
        number, low, high = task.data["number"], 1, HIGHEST
        messages: list[Message] = [{"role": "user", "content": f"1-{HIGHEST}?"}]
        for _ in range(self.guesses):
            turn = await ctx.sample(messages, state=f"{low}-{high}")
            guess = int(turn.answer) if turn.answer.isdecimal() else 0
            if guess == number:
                ctx.reward(1.0)
                return
            low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
            answer = "what?" if not 1 <= guess <= HIGHEST else "higher" if guess < number else "lower"
            messages += [turn.message, {"role": "user", "content": answer}]
