"""Boxes to move away, at most three at a time: the policy sees those that are left after each of its moves."""

import io
import random
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw

from penstock import Context, Message, Task

CELL, SIDE = 28, 3
"""Pixels of a cell, and cells of a side: a cell is what one feature of a fresh model stands for."""
MOST_MOVED, MOVES = 3, 3
"""Most boxes that are moved at once, and moves of a game."""
PROMPT = "How many?"
Cell = tuple[int, int]


def shuffled_cells(draws: random.Random) -> list[Cell]:
    return draws.sample([(x, y) for x in range(SIDE) for y in range(SIDE)], SIDE * SIDE)


def draw_boxes(cells: Sequence[Cell]) -> bytes:
    """Draw a box in each of these cells. Returns the picture as PNG."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
    pen = ImageDraw.Draw(image)
    for x, y in cells:
        pen.rectangle((x * CELL + 5, y * CELL + 5, x * CELL + 22, y * CELL + 22), fill="royalblue")
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


class Boxes:
    """A game is won if all boxes are gone after three moves. Who wants to move more than there are has lost."""

    def tasks(self, seed: int) -> Iterator[Task]:
        draws, index = random.Random(seed), 0
        while True:
            yield Task(str(index), draws.getrandbits(32), {"boxes": draws.randint(4, MOST_MOVED * MOVES)})
            index += 1

    async def run(self, task: Task, ctx: Context) -> None:
        left = shuffled_cells(random.Random(task.seed))[: task.data["boxes"]]
        messages: list[Message] = []
        for _ in range(MOVES):
            messages.append({"role": "user", "content": [draw_boxes(left), PROMPT]})
            turn = await ctx.sample(messages)
            messages.append(turn.message)
            number = int(turn.answer) if turn.answer.isdecimal() else 0
            if not 1 <= number <= min(MOST_MOVED, len(left)):
                return
            left = left[number:]
            if not left:
                ctx.reward(1.0)
                return
