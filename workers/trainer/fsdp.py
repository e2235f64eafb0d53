"""FSDP2 around a model: float32 master weights in shards, AdamW, sums of gradients, and which elements a rank has.

Every decoder layer is one unit and the rest (embedding, last norm, output layer) is the root. Parameters are DTensors
split along dim 0, so that a rank's part of one is a range of its elements. A `TrainEngine` (`engine.py`), made by
`trainer.py`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.workers.trainer.engine import Piece
from penstock.workers.trainer.lora import adapters, hf_name, is_adapter
from penstock.workers.trainer.policy_model import PolicyModel
from penstock.workers.trainer.process_group import ProcessGroup
from penstock.workers.trainer.scalar_model import ScalarModel

KEEP_WHOLE_BYTES = 2 * 2**30
"""A model up to this size (float32) is gathered once an optimizer step, and its gradients are reduced once: less
communication, and whole gradients and parameters on each rank meanwhile. A larger one is gathered layer by layer,
forward and backward.
"""
MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpEngine:
    """One rank's shard of a model and of its optimizer. Every rank makes the same calls, since most of them
    communicate."""

    def __init__(self, model: PolicyModel | ScalarModel, group: ProcessGroup, config: TrainerConfig) -> None:
        """`model`: loaded, on the CPU; without parameters that require gradients it gets no optimizer."""
        num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
        self.model = model
        self.group = group
        self.keeps_whole = num_bytes <= KEEP_WHOLE_BYTES
        policy = MixedPrecisionPolicy()
        if config.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(group.device.type, (group.num_ranks,))
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.keeps_whole)
        self.root: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        model.to(group.device)  # buffers
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if group.num_ranks > 1:
            for unit in self.units:
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
        self._clip_norm = config.optimizer.clip_norm
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_adamw(trained, config.optimizer) if trained else None

    def forward(self, *arguments: Any) -> Any:
        return self.model(*arguments)

    def before_backward(self, is_last: bool) -> None:
        """Gradients of a step's micro-batches add up unreduced until the last one, where they may be kept whole."""
        if self.keeps_whole:
            self.root.set_requires_gradient_sync(is_last)
            self.root.set_reshard_after_backward(is_last)
            self.root.set_is_last_backward(is_last)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self, rate: float) -> float:
        assert self.optimizer is not None
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate
        norm = self._grad_norm()
        value = float(norm)
        if math.isfinite(value):
            if self._clip_norm:
                scale = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
                for gradient in self._local_gradients():
                    gradient.mul_(scale)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def free(self) -> None:
        for unit in self.units:
            unit.reshard()

    def _local_gradients(self) -> list[Tensor]:
        """This rank's shards, in the model's order."""
        return [local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]

    def _grad_norm(self) -> Tensor:
        """Norm of the whole gradient, `[]`, the same on every rank. Collective."""
        norm = nn.utils.get_total_norm(self._local_gradients())
        if self.group.num_ranks == 1:
            return norm
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    # What lies where

    @torch.no_grad()
    def pieces(self) -> Iterator[Piece]:
        """With LoRA the values are copies, each merged as it is asked for: never more than one tensor at a time."""
        lm = self.model.lm
        changes = {f"{adapter.name}.weight": adapter for adapter in adapters(lm)}
        for own_name, parameter in lm.named_parameters():
            if is_adapter(own_name):
                continue
            name = hf_name(own_name)
            values = local(parameter)
            if name in changes:
                values = values + changes[name].delta()
            yield self._piece(name, parameter, values)
        yield from buffer_pieces(lm, self.group.rank)

    def state(self) -> Iterator[Piece]:
        assert self.optimizer is not None
        for name, parameter in self.model.lm.named_parameters():
            if not parameter.requires_grad:
                continue
            yield self._piece(f"weights/{name}", parameter, parameter)
            moments = self._moments(parameter)
            for moment in MOMENTS:
                yield self._piece(f"{moment}/{name}", parameter, moments[moment])

    def num_optimizer_steps(self) -> int:
        assert self.optimizer is not None
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)

    def loaded(self, num_optimizer_steps: int) -> None:
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            state["step"].fill_(num_optimizer_steps)

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a parameter, which it has from its first step on: made here if it is asked for before."""
        assert self.optimizer is not None
        state = self.optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self.group.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter)
        return state

    def _piece(self, name: str, parameter: Tensor, tensor: Tensor) -> Piece:
        shape = tuple(parameter.shape)
        first = first_row(shape[0], self.group.rank, self.group.num_ranks) if shape else 0
        row_elements = math.prod(shape[1:])
        return Piece(name, shape, first * row_elements, local(tensor).detach().reshape(-1))


def make_adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def buffer_pieces(lm: nn.Module, rank: int) -> Iterator[Piece]:
    """Persistent buffers, which every rank has whole: rank 0's count."""
    persistent = lm.state_dict().keys()
    for name, buffer in lm.named_buffers():
        if name in persistent:
            yield Piece(name, tuple(buffer.shape), 0, buffer.reshape(-1) if rank == 0 else buffer.reshape(-1)[:0])


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(num_rows: int, rank: int, num_ranks: int) -> int:
    """Where a rank's shard of dim 0 starts: shards are as large as the first one, the last may be short or empty."""
    return min(num_rows, rank * -(-num_rows // num_ranks))


def decoder_layers(model: PolicyModel | ScalarModel) -> list[nn.Module]:
    """The blocks that are sharded one by one: what the model's class calls indivisible."""
    names = set(model.lm._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
