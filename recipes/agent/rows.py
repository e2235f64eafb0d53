"""Sums of five digits, as a dataset."""

import random
from collections.abc import Iterator
from typing import Any


def sums(seed: int) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)
    while True:
        a, b = draws.randint(10_000, 99_999), draws.randint(10_000, 99_999)
        yield {"question": f"{a}+{b}", "answer": str(a + b)}
