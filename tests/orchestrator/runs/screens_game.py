"""An environment that shows pictures: those of the row, and one that it draws after the first answer."""

from typing import Any

from PIL import Image

from penstock.workers.agents.environment import Task
from tests.orchestrator.runs.digits_game import share_of_digits


class Screens:
    async def run(self, task: Task, ctx: Any) -> None:
        turn = await ctx.sample(task.messages)
        share = share_of_digits(turn.answer)
        screen = Image.new("RGB", (28 * (1 + len(turn.answer) % 3), 56), (int(255 * share), 0, 0))
        await ctx.sample([*task.messages, turn.message, {"role": "user", "content": ["and", screen, "?"]}])
        ctx.reward(share)
