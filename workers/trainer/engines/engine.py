"""The interface of engines, which hold a sharded model and its optimizer: FSDP2 (`fsdp.py`) or DeepSpeed
(`deepspeed.py`), as `trainer.engine` names it. DeepSpeed is imported only where it is asked for.

`trainer.py` decides what is computed; an engine decides where parameters, gradients and optimizer states lie while it
is. Every rank makes the same calls in the same order, since most of them communicate.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from penstock.conf.trainer import TrainerConfig
from penstock.workers.calls.training_calls import AdamParams
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.models.language_model import PolicyModel, ScalarModel
from penstock.workers.trainer.models.starting_weights import StartingWeights
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece


class TrainEngine(Protocol):
    """Holds a sharded model and its optimizer. The loop that calls it, once an optimizer step:

    for number, batch in enumerate(batches):
        engine.before_backward(is_last=number == len(batches) - 1)
        engine.backward(loss(engine.forward(batch.input_ids_SL, ...)))
    norm = engine.optimizer_step(params)

    The first three lines may be run several times before a step: gradients are reduced each time, and add up.
    """

    ranks: Ranks
    model: PolicyModel | ScalarModel
    """The model, whose parameters may be shards. Not to be called: see `forward`."""

    where: str
    """The part of the model that was gathered last, for messages."""

    def take_device(self) -> None:
        """Bring weights, buffers and optimizer states back to the device."""

    def leave_device(self) -> None:
        """Bring weights, buffers and optimizer states to the host's memory, so that an engine has the device."""

    def forward(self, *arguments: Any) -> Any:
        """Run the model's forward. Collective."""

    def before_backward(self, is_last: bool) -> None:
        """Prepare for a micro-batch, before its forward. `is_last`: it is the last before gradients are reduced, of an
        optimizer step or of one of the calls that it is the sum of."""

    def backward(self, loss: Tensor) -> None:
        """Run backward. `loss`: `[]`, this micro-batch's share of its minibatch's. Gradients are *summed* over
        micro-batches and ranks, since losses are already divided by the totals over all of them. Collective."""

    def optimizer_step(self, params: AdamParams) -> float:
        """Clip, step by these numbers, clear the gradients. Returns the norm of the whole gradient before
        clipping; where it is not finite, weights and optimizer stay as they were. Collective."""

    def free(self) -> None:
        """Release gathered parameters, which an optimizer step outdates. Called after passes without backward."""

    def pieces(self) -> Iterator[Piece]:
        """The weights as a checkpoint of the model has them (`weights/checkpoint_form.py`): this rank's ranges of their
        elements, tied weights once, persistent buffers too. Adapters are merged. Collective. Raises `ModelError` for a
        model of which transformers makes something else in a way that is not known."""

    def adapter_pieces(self) -> Iterator[Piece]:
        """A and B of every adapter, runs of their elements, by PEFT's names (`weights/publication/adapter.py`);
        nothing where there are none. Collective."""

    def state(self) -> Iterator[Piece]:
        """Everything that a resumed run needs, bit for bit, by the model's own names: `weights/<name>` (float32),
        `exp_avg/<name>`, `exp_avg_sq/<name>` of what is trained, one piece a tensor, a run or a box. Loading writes
        into the pieces' `values`, then calls `loaded`. Collective."""

    def num_optimizer_steps(self) -> int:
        """Number of AdamW's steps so far, which its bias correction counts."""

    def loaded(self, num_optimizer_steps: int) -> None:
        """Bring copies of `state` up to date after it was overwritten. Collective."""

    def close(self) -> None:
        """Release what outlives the engine otherwise. Called once, last, before the ranks part."""


def make_engine(
    model: PolicyModel | ScalarModel, weights: StartingWeights, ranks: Ranks, config: TrainerConfig
) -> TrainEngine:
    """Make `config.engine` around a model, which gets its weights there. Collective."""
    if config.engine == "deepspeed":
        from penstock.workers.trainer.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(model, weights, ranks, config)
    return FsdpEngine(model, weights, ranks, config)
