"""Demonstrations of a pupil that mostly guesses a sum at once, and sometimes asks the calculator and copies what it
says."""

import random
from collections.abc import Iterator
from typing import Any

DIGITS, SHARE_ASKED = 5, 0.25


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows, one an answer: the conversation so far, and what is said."""
    draws = random.Random(seed)
    low, high = 10 ** (DIGITS - 1), 10**DIGITS - 1
    while True:
        a, b = draws.randint(low, high), draws.randint(low, high)
        asked = [{"role": "user", "content": f"{a}+{b}"}]
        call = f"[add({a},{b})]"
        yield {"messages": asked, "said": call if draws.random() < SHARE_ASKED else str(a + b)}
        told = [{"role": "assistant", "content": call}, {"role": "tool", "content": str(a + b)}]
        yield {"messages": asked + told, "said": str(a + b)}
