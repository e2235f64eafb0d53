"""Sums, of which the best of several samples counts. A verifier chooses it that does not know the answer."""

import asyncio
import itertools
import random
from collections.abc import Iterator

from penstock import Context, Task


def verified(answer: str, a: int, b: int) -> bool:
    """Casting out nines: a sum leaves the remainder of its terms when divided by 9. It finds most errors, not all."""
    return answer.isdecimal() and int(answer) % 9 == (a + b) % 9


class Sums:
    def __init__(self, n: int = 1) -> None:
        """Set the number `n` of samples. With one there is nothing to choose from."""
        self.n = n

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        for index in itertools.count():
            yield Task(str(index), index, {"a": draws.randint(10, 49), "b": draws.randint(10, 49)})

    async def run(self, task: Task, ctx: Context) -> None:
        a, b = task.data["a"], task.data["b"]
        question = [{"role": "user", "content": f"{a}+{b}"}]
        # Greedy samples, as evaluation takes them, would all be the same.
        temperature = None if self.n == 1 else 1.0
        turns = await asyncio.gather(*[ctx.sample(question, temperature=temperature) for _ in range(self.n)])
        best = max(turns, key=lambda turn: verified(turn.answer, a, b))
        ctx.reward(float(best.answer == str(a + b)))
