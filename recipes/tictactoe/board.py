"""Tic-tac-toe on a string of nine characters, and a player that never loses. Pure.

x.o          "x.o.x...." , squares 1 to 9 row by row; x begins
.x.
...
"""

import functools

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def moves(board: str) -> list[int]:
    """Free squares, from 1."""
    return [square for square, mark in enumerate(board, 1) if mark == "."]


def after(board: str, square: int, mark: str) -> str:
    return board[: square - 1] + mark + board[square:]


def winner(board: str) -> str:
    """The mark that has won, x or o, or nothing."""
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), "")


def is_over(board: str) -> bool:
    return bool(winner(board)) or "." not in board


def other(mark: str) -> str:
    return "o" if mark == "x" else "x"


@functools.cache
def value(board: str, mark: str) -> int:
    """The result, 1, 0 or -1, that `mark`, which is to move, gets if both play as well as can be."""
    if winner(board):
        return -1
    if "." not in board:
        return 0
    return max(-value(after(board, square, mark), other(mark)) for square in moves(board))


def best_moves(board: str, mark: str) -> list[int]:
    return [square for square in moves(board) if -value(after(board, square, mark), other(mark)) == value(board, mark)]
