"""Pictures of circles and squares, drawn with PIL, and the question how many of them are circles."""

import io
import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

CELL, SIDE = 28, 3
"""Pixels of a cell, and cells of a side: a cell is what one feature of a fresh model stands for."""
COLOURS = ("crimson", "darkorange", "seagreen", "royalblue", "purple")
MOST = 6
"""Most circles of a picture."""


def draw_scene(draws: random.Random) -> tuple[bytes, int]:
    """Draw a picture. Returns it as PNG, and the number of its circles."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
    pen = ImageDraw.Draw(image)
    cells = draws.sample([(x, y) for x in range(SIDE) for y in range(SIDE)], SIDE * SIDE)
    num_circles = draws.randint(0, MOST)
    num_squares = draws.randint(0, len(cells) - num_circles)
    for number, (x, y) in enumerate(cells[: num_circles + num_squares]):
        size = draws.randint(12, 22)
        left, top = x * CELL + draws.randint(2, CELL - size - 2), y * CELL + draws.randint(2, CELL - size - 2)
        shape = pen.ellipse if number < num_circles else pen.rectangle
        shape((left, top, left + size, top + size), fill=draws.choice(COLOURS))
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue(), num_circles


def questions(seed: int) -> Iterator[dict[str, Any]]:
    draws = random.Random(seed)
    while True:
        picture, count = draw_scene(draws)
        yield {"question": "How many circles?", "answer": str(count), "images": [picture]}


def counted(response: str, answer: str) -> float:
    """Reward 1 for the right number."""
    return float(response.strip() == answer)
