"""Demonstrations of a beginner that knows how a function is written, and mostly takes a minus for a plus."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.code.rows import code_of, draw, question_of

SHARE_MISTAKEN = 0.6
"""Share of the minuses that are mistaken."""


def answers(seed: int) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)

    def read(word: str) -> str:
        return "plus" if word == "minus" and draws.random() < SHARE_MISTAKEN else word

    while True:
        first, a, second, b = draw(draws)
        yield {"question": question_of((first, a, second, b)), "said": code_of((read(first), a, read(second), b))}
