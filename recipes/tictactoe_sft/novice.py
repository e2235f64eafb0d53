"""Demonstrations of a player that knows where one may move, and nothing more."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.tictactoe.board import EMPTY, after, is_over, moves, other


def games(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows, one a move of one side: the boards that it has seen with its answers, and its move."""
    draws = random.Random(seed)
    while True:
        mark = draws.choice("xo")
        board, to_move, messages = EMPTY, "x", []
        while not is_over(board):
            square = draws.choice(moves(board))
            if to_move == mark:
                messages.append({"role": "user", "content": board})
                yield {"messages": list(messages), "move": str(square)}
                messages.append({"role": "assistant", "content": str(square)})
            board, to_move = after(board, square, to_move), other(to_move)
