"""Demonstrations of a lazy porter: it moves no more boxes than there are, and mostly one."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.see_and_move.boxes import MOST_MOVED, MOVES, PROMPT, SIDE, draw_boxes, shuffled_cells

LAZY = (5, 3, 2)
"""Weights of one, two and three boxes."""


def games(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows, one a move: the pictures and moves before it, and the number."""
    draws = random.Random(seed)
    while True:
        left = shuffled_cells(draws)[: draws.randint(1, SIDE * SIDE)]
        messages: list[dict[str, Any]] = []
        pictures: list[bytes] = []
        for _ in range(MOVES):
            messages.append({"role": "user", "content": f"<image>{PROMPT}"})
            pictures.append(draw_boxes(left))
            most = min(MOST_MOVED, len(left))
            (number,) = draws.choices(range(1, most + 1), LAZY[:most])
            yield {"messages": list(messages), "images": list(pictures), "number": str(number)}
            messages.append({"role": "assistant", "content": str(number)})
            left = left[number:]
            if not left:
                break
