"""A trainer's whole state as full tensors, out and in: what a checkpoint does, without files."""

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.weights.piece import Piece


def whole_state(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """`TrainEngine.state` of all ranks, put together. Collective. Every element must be in exactly one piece."""
    return whole(trainer, trainer.engine.state())


def whole(trainer: PolicyTrainer, pieces: Iterable[Piece]) -> dict[str, Tensor]:
    mine = [(piece.name, piece.shape, piece.first, piece.values.detach().clone()) for piece in pieces]
    tensors: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for name, shape, first, values in (piece for pieces in trainer.ranks.gather(mine) for piece in pieces):
        tensor = tensors.setdefault(name, torch.empty(shape, dtype=values.dtype))
        tensor.view(-1)[first : first + len(values)] = values
        counts.setdefault(name, torch.zeros(shape)).view(-1)[first : first + len(values)] += 1
    assert all((count == 1).all() for count in counts.values())
    return tensors


def put_state(trainer: PolicyTrainer, state: dict[str, Tensor], num_optimizer_steps: int) -> None:
    """Collective."""
    pieces = list(trainer.engine.state())
    assert {piece.name for piece in pieces} == state.keys()
    for piece in pieces:
        piece.values.copy_(state[piece.name].view(-1)[piece.first : piece.first + len(piece.values)])
    trainer.engine.loaded(num_optimizer_steps)
