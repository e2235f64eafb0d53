"""The interface of the trainer's engines, which hold a sharded model and its optimizer, and what all of them share.

`policy_trainer.py` decides what is computed; an engine decides where parameters, gradients and optimizer states lie:
FSDP2 (`fsdp.py`) or DeepSpeed (`deepspeed.py`), as `trainer.engine` names it. Every rank makes the same calls in the
same order, since most of them communicate.

    AdamW    made, its states, the numbers of a step, the learning rate of an update, which all its steps share
    moves    between the device and the host, where ranks and engines share a device in turns (`placement=colocated`)

DTensors and their moments move by `Tensor.to`, FSDP2's parameters by `Module.to`. DeepSpeed's masters keep their
identity, since DeepSpeed has them in lists of its own, and get other memory. Activations move between forward and
backward.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.workers.protocols import AdamParams
from penstock.workers.runtime.host_memory import HostBuffer, HostPart
from penstock.workers.trainer.models.language_model import PolicyModel, ScalarModel
from penstock.workers.trainer.models.starting_weights import StartingWeights
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece

KeptState = Mapping[str, Tensor]
"""Values of pieces of an engine's `state` that are in host memory already, by the pieces' names; not to be written."""
NOTHING_KEPT: KeptState = MappingProxyType({})


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

    def leave_device(self, kept: KeptState = NOTHING_KEPT) -> None:
        """Bring weights, buffers and optimizer states to the host's memory, so that an engine has the device. `kept`:
        what need not be copied; its memory may serve in the place of copies until `take_device`."""

    def forward(self, *arguments: Any) -> Any:
        """Run the model's forward. Collective."""

    def split_over(self, size: int | None) -> None:
        """Have groups of `size` ranks split the tokens of the passes that follow, one of those sizes that
        `split_sizes` names; None: the largest of them."""

    @property
    def split_sizes(self) -> list[int]:
        """Numbers of ranks that may split the tokens of a pass, ascending."""

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

    def pieces(self, *, stacked: bool = False) -> Iterator[Piece]:
        """The weights as a checkpoint of the model has them, or with `stacked` a publication
        (`weights/checkpoint_form.py`): this rank's ranges of their elements, tied weights once, persistent buffers too.
        Adapters are merged, of several the one in use. Collective. Raises `ModelError` for a model of which
        transformers makes something else in a way that is not known."""

    def adapter_pieces(self) -> Iterator[Piece]:
        """A and B of every adapter, runs of their elements, by PEFT's names (`weights/publication/adapter.py`), of
        several policies after theirs: `solver/base_model.…`; nothing where there are none. Collective."""

    def state(self) -> Iterator[Piece]:
        """Everything that a resumed run needs, bit for bit, by the model's own names: `weights/<name>` (float32),
        `exp_avg/<name>`, `exp_avg_sq/<name>` of what is trained, one piece a tensor, a run or a box. Loading writes
        into the pieces' `values`, then calls `loaded`. Collective."""

    def num_optimizer_steps(self) -> int:
        """Number of AdamW's steps so far, which its bias correction counts; of several adapters, of the one in use."""

    def loaded(self, num_optimizer_steps: int) -> None:
        """Bring copies of `state` up to date after it was overwritten; of several adapters, of the one in use.
        Collective."""

    def close(self) -> None:
        """Release what outlives the engine otherwise. Called once, last, before the ranks part."""


def make_engine(
    model: PolicyModel | ScalarModel, weights: StartingWeights, ranks: Ranks, config: TrainerConfig
) -> TrainEngine:
    """Make the engine that `config` names around a model, which gets its weights there. Collective."""
    module, _, name = config.capabilities.implementation.partition(":")
    engine: TrainEngine = getattr(import_module(module), name)(model, weights, ranks, config)
    return engine


MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Make AdamW. Parameters of one mesh go together, since an operation on several DTensors wants them all on the
    same."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": some} for some in by_mesh.values()],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def moments_of(optimizer: torch.optim.AdamW, tensor: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a tensor that it steps. AdamW makes it at its first step; it is made here if asked for
    before."""
    state: dict[str, Tensor] = optimizer.state[tensor]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(tensor)
    return state


def num_steps(optimizer: torch.optim.AdamW | None, parameters: Iterable[Tensor] | None = None) -> int:
    """Number of steps so far of these parameters or of all, which the bias correction counts."""
    assert optimizer is not None
    known = optimizer.state if parameters is None else [one for one in parameters if one in optimizer.state]
    return max((int(optimizer.state[one]["step"]) for one in known), default=0)


def set_num_steps(optimizer: torch.optim.AdamW | None, count: int, parameters: Iterable[Tensor] | None = None) -> None:
    assert optimizer is not None
    for one in optimizer.state if parameters is None else parameters:
        optimizer.state[one]["step"].fill_(count)


def set_params(optimizer: torch.optim.AdamW, params: AdamParams) -> None:
    """Have the next step take these numbers; the norm of clipping is the engine's."""
    for param_group in optimizer.param_groups:
        param_group |= {
            "lr": params.learning_rate,
            "betas": (params.beta1, params.beta2),
            "eps": params.eps,
            "weight_decay": params.weight_decay,
        }


def learning_rate(config: OptimizerConfig, update: int, max_steps: int) -> float:
    """Rate of an update, counted from 0.

    Warm-up: `lr · (update + 1) / warmup_steps` for the first `warmup_steps`, so that none is lost at rate 0. Then
    constant, or half a cosine from `lr` down to `lr · min_lr_share` at `max_steps`, and level from there.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (update - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    share = config.min_lr_share + (1.0 - config.min_lr_share) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * share


HOST = torch.device("cpu")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers, and no parameter."""
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        put_buffer(model, name, buffer.to(device))


def put_buffer(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Put a buffer into the place of the one of this name."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, buffer)


def move_moments(optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Move an optimizer's states, and not what it steps."""
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            state[name] = value.to(device, non_blocking=True)


def move_masters(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Give what an optimizer steps memory on the device, with the same values."""
    for group in optimizer.param_groups:
        for master in group["params"]:
            master.data = master.data.to(device, non_blocking=True)


def give_back(device: torch.device) -> None:
    """Wait for copies under way, and give the device's unused memory back, for other processes."""
    if device.type != HOST.type:
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()


MIN_OFFLOADED_BYTES = 2**16
"""Bytes of the smallest activation that goes to the host: a copy of fewer costs more than they are worth."""


class HostActivations(saved_tensors_hooks):
    """Keeps what a forward within it saves for its backward in the host's memory, page-locked where it comes from a
    GPU, and brings it back when backward asks for it. Like torch's `save_on_cpu`, but for weights, which the engine
    gathers and lets go itself, and for what is small."""

    def __init__(self, buffer: HostBuffer) -> None:
        """`buffer`: of the device, used again by each forward; forward and backward run on one stream."""
        super().__init__(partial(to_host, buffer), partial(from_host, buffer.device))


KeptActivation = tuple[HostPart | None, Tensor]
"""Memory on the host, and the tensor in it; None and the tensor itself where it stays."""


def to_host(buffer: HostBuffer, saved: Tensor) -> KeptActivation:
    """Copy what is saved for backward, unless it is a weight or small."""
    if isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter):
        return None, saved
    if saved.nbytes < MIN_OFFLOADED_BYTES:
        return None, saved.detach()  # the result of an operation would keep itself alive
    part = buffer.take(saved.nbytes)
    strides = torch.empty_like(saved, device="meta").stride()
    copy = part.memory.view(saved.dtype).as_strided(saved.shape, strides)
    return part, copy.copy_(saved.detach(), non_blocking=True)


def from_host(device: torch.device, kept: KeptActivation) -> Tensor:
    """Copy it back, on whichever device it was."""
    part, saved = kept
    if part is None:
        return saved
    return torch.empty_like(saved, device=device).copy_(saved, non_blocking=True)
