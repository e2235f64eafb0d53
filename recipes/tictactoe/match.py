"""A match of the policy against itself, an opponent that moves at random, or one that never loses."""

import itertools
import random
from collections.abc import Iterator, Sequence

from penstock import Context, Message, Task
from penstock.recipes.tictactoe.board import EMPTY, after, best_moves, is_over, moves, other, winner

WIN, DRAW, LOSS = 1.0, 0.5, 0.0


class Match:
    """A game whose one side the policy plays; every turn of it is trained. Against itself, the other side's are not."""

    def __init__(self, opponents: Sequence[str] = ("self",)) -> None:
        """Set the `opponents`: self, random, perfect; one task after the other."""
        self.opponents = opponents

    def tasks(self, seed: int) -> Iterator[Task]:
        for index in itertools.count():
            opponent, mark = self.opponents[index % len(self.opponents)], "xo"[index // len(self.opponents) % 2]
            yield Task(str(index), seed + index, {"opponent": opponent, "mark": mark}, problem=seed + index)

    async def run(self, task: Task, ctx: Context) -> None:
        mark, opponent, draws = task.data["mark"], task.data["opponent"], random.Random(task.seed)
        board, to_move = EMPTY, "x"
        mine: list[Message] = []
        theirs: list[Message] = []
        while not is_over(board):
            if to_move == mark:
                square = await self.ask(ctx, mine, board, train=True)
            elif opponent == "self":
                square = await self.ask(ctx, theirs, board, train=False)
            else:
                square = draws.choice(moves(board) if opponent == "random" else best_moves(board, to_move))
            if square not in moves(board):  # it loses at once
                if not mine:
                    ctx.reject("no_move", "the other side has lost before this one was to move")
                ctx.reward(LOSS if to_move == mark else WIN)
                return
            board, to_move = after(board, square, to_move), other(to_move)
        ctx.reward(DRAW if not winner(board) else WIN if winner(board) == mark else LOSS)

    async def ask(
        self, ctx: Context, messages: list[Message], board: str, train: bool, policy: str | None = None
    ) -> int:
        """Ask the policy for a square. Returns 0 for what is none."""
        messages.append({"role": "user", "content": board})
        turn = await ctx.sample(messages, train=train, policy=policy)
        messages.append(turn.message)
        said = turn.message["content"]
        return int(said) if said.isdecimal() and said.isascii() else 0
