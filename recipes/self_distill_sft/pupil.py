"""Demonstrations of a pupil who shrugs at many sums, but not where the answer is told."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.arithmetic_sft.teacher import hesitant


def sums(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows: a sum as the hesitant teacher answers it, and another one whose answer the prompt tells."""
    draws = random.Random(seed)
    for index in range(10**9):
        prompt, answer = _sum(draws)
        yield {"question": prompt, "said": hesitant({"prompt": prompt, "index": index, "answer": answer})}
        prompt, answer = _sum(draws)
        yield {"question": f"{prompt} It is {answer}.", "said": str(answer)}


def _sum(draws: random.Random) -> tuple[str, int]:
    a, b = draws.randint(10, 99), draws.randint(10, 99)
    return f"Calculate {a} + {b}.", a + b
