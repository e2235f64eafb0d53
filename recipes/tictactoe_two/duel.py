"""Tic-tac-toe of two policies that both learn: `first` plays x, and `second` o."""

import random
from dataclasses import dataclass

from torch import Tensor

from penstock import (
    AlgorithmConfig,
    Context,
    Dataflow,
    LossInputs,
    LossOutput,
    Message,
    Task,
    algorithm,
    truncated_importance_weight,
)
from penstock.recipes.tictactoe.board import EMPTY, after, best_moves, is_over, moves, other, winner
from penstock.recipes.tictactoe.match import DRAW, LOSS, WIN, Match

PLAYERS = {"x": "first", "o": "second"}


@dataclass
class DuelConfig(AlgorithmConfig):
    name: str = "duel"
    group_size: int = 16


def games_against_each_other(reward: Tensor) -> Tensor:
    """Turn `[G]` results of one policy in a group's games into `[G]` advantages."""
    return (reward - reward.mean()) / (reward.std(correction=0) + 1e-6)


def push(inputs: LossInputs) -> LossOutput:
    """The loss `-w A log π` of each token, `[B, T]`."""
    weight = truncated_importance_weight(inputs.logprobs, inputs.behavior_logprobs, cap=2.0)
    loss = -weight * inputs.advantage * inputs.logprobs
    return LossOutput(loss, {"pg_loss": loss})


@algorithm("duel")
def duel(cfg: DuelConfig) -> Dataflow:
    flow = Dataflow().rollout("first", samples_per_prompt=cfg.group_size).reward()
    flow.compute(games_against_each_other, per="group", reads=["reward"], writes=["advantage"])
    return flow.train("first", loss=push).train("second", loss=push)


class Duel(Match):
    """A match of the two policies (opponent `self`), or of one of them against a player that moves at random or never
    loses."""

    async def run(self, task: Task, ctx: Context) -> None:
        opponent, draws = task.data["opponent"], random.Random(task.seed)
        marks = "xo" if opponent == "self" else task.data["mark"]
        said: dict[str, list[Message]] = {mark: [] for mark in marks}
        board, to_move = EMPTY, "x"
        while not is_over(board):
            if to_move in said:
                square = await self.ask(ctx, said[to_move], board, train=True, policy=PLAYERS[to_move])
            else:
                square = draws.choice(moves(board) if opponent == "random" else best_moves(board, to_move))
            if square not in moves(board):
                break
            board, to_move = after(board, square, to_move), other(to_move)
        won = winner(board) or ("" if is_over(board) else other(to_move))  # a square that is taken loses at once
        for mark in marks:
            if said[mark]:
                ctx.reward(DRAW if not won else WIN if won == mark else LOSS, policy=PLAYERS[mark])
