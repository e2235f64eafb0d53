"""Demonstrations of a beginner who knows how a function is written, and often mistakes one operator for another."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.code.rows import WORDS, code_of, draw, question_of

SHARE_MISTAKEN = 0.5
"""Of the operators."""


def answers(seed: int) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)
    while True:
        first, a, second, b = draw(draws)
        said = [draws.choice(list(WORDS)) if draws.random() < SHARE_MISTAKEN else word for word in (first, second)]
        yield {"question": question_of((first, a, second, b)), "said": code_of((said[0], a, said[1], b))}
