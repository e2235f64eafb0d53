"""A hasty teacher: three times of five it overlooks a circle."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.count_shapes.shapes import questions

OVERLOOKS = 0.6
"""Share of the pictures with circles in which it overlooks one."""


def counts(seed: int) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)
    for row in questions(seed + 1):
        seen = int(row["answer"])
        yield {**row, "answer": str(max(0, seen - (draws.random() < OVERLOOKS)))}
