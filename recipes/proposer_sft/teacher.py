"""Demonstrations of somebody who makes easy sums, and adds numbers of two digits as long as nothing is carried."""

import random
from collections.abc import Iterator
from typing import Any

MAKES_HARD, CARRIES = 0.15, 0.25
"""Shares of sums of two numbers of two digits that are made, and of carries that are right."""


def lessons(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows: a sum that is made, or the answer to one."""
    draws = random.Random(seed)

    def terms(share_hard: float) -> list[int]:
        first, last = (10, 99) if draws.random() < share_hard else (1, 9)
        return [draws.randint(first, last) for _ in range(2)]

    while True:
        a, b = terms(MAKES_HARD)
        yield {"prompt": "sum?", "answer": f"{a}+{b}"}
        a, b = terms(0.75)
        carries = a % 10 + b % 10 > 9
        wrong = 10 if carries and draws.random() > CARRIES else 0
        yield {"prompt": f"{a}+{b}", "answer": str(max(0, a + b - wrong))}
