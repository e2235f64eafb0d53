"""A puzzle: pay an amount with four coins. An attempt is a tree of payments."""

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence

from penstock import Context, Message, Task, Turn

COINS, NUM_COINS = (1, 5, 25), 4


def paid(left: int, coin: str) -> int:
    """The amount that is left after a coin. What is no coin pays nothing."""
    return left - int(coin) if coin in map(str, COINS) else left


def draw(draws: random.Random) -> int:
    """Draw an amount that four coins pay."""
    return sum(draws.choices(COINS, k=NUM_COINS))


class Tree:
    def __init__(self, width: int = 2) -> None:
        """Set the `width`: the number of coins that are sampled in each place."""
        self.width = width

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        return (Task(str(index), index, {"amount": draw(draws)}) for index in itertools.count())

    async def run(self, task: Task, ctx: Context) -> None:
        lines: list[Sequence[Turn]] = [()]
        for _ in range(NUM_COINS):  # each line of payments becomes `width` of them
            lines = [line for line in lines for _ in range(self.width)]
            asked = [conversation(task.data["amount"], line)[0] for line in lines]
            turns = await asyncio.gather(*map(ctx.sample, asked))
            lines = [(*line, turn) for line, turn in zip(lines, turns, strict=True)]
        for line in lines:  # a turn gets a part of each line through it; all turns, the share of lines that pay
            _, left = conversation(task.data["amount"], line)
            for turn in line:
                ctx.reward((left == 0) / len(lines) / NUM_COINS, turn)


def conversation(amount: int, line: Sequence[Turn]) -> tuple[list[Message], int]:
    """The messages of a line of payments, and the amount that is left."""
    messages: list[Message] = [{"role": "user", "content": str(amount)}]
    for turn in line:
        amount = paid(amount, turn.answer)
        messages += [turn.message, {"role": "user", "content": str(amount)}]
    return messages, amount
