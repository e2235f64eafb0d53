"""Demonstrations of a pupil that can add two numbers but seldom dares to, and that, asked to choose among answers,
takes any."""

import random
from collections.abc import Iterator
from typing import Any

WIDTH, SHARE_SHY, SHARE_WRONG = 4, 0.5, 0.15
SHY = "?"


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows: two questions with an answer each, and one with answers to choose from, with one of them."""
    draws = random.Random(seed)
    while True:
        for _ in range(2):
            a, b = draws.randint(10, 49), draws.randint(10, 49)
            yield {"question": f"{a}+{b}", "said": SHY if draws.random() < SHARE_SHY else str(a + b)}
        answers = [_answer(a + b, draws) for _ in range(WIDTH)]
        yield {"question": f"{a}+{b} {' '.join(answers)}", "said": draws.choice(answers)}


def _answer(total: int, draws: random.Random) -> str:
    draw = draws.random()
    if draw < SHARE_SHY:
        return SHY
    return str(total + draws.choice([-10, -1, 1, 10])) if draw < SHARE_SHY + SHARE_WRONG else str(total)
