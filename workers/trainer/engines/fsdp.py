"""FSDP2 around a model: float32 master weights in shards, AdamW, sums of gradients, and which elements a rank has.

Every decoder layer is one unit and the rest (embedding, last norm, output layer) is the root. Parameters are DTensors
split along dim 0, so that a rank's part of one is a range of its elements; of several copies of the model (`mesh.py`)
each has the same ranges. Tensor parallelism splits them before that (`tensor_parallel.py`), sequence parallelism splits
what they are applied to (`ulysses.py`). A `TrainEngine` (`train_engine.py`).

Legend: R copies, F ranks that FSDP2 splits one over, T ranks of tensor parallelism.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils import swap_tensors

from penstock.conf.trainer import KEEP_WHOLE_BYTES, TrainerConfig
from penstock.workers.protocols import AdamParams
from penstock.workers.runtime.host_memory import HostBuffer, HostPart, padded
from penstock.workers.trainer.engines.lora import (
    adapter_names,
    adapters,
    hf_name,
    is_adapter,
    trained_parameters,
)
from penstock.workers.trainer.engines.mesh import RankMesh, first_row, local
from penstock.workers.trainer.engines.tensor_parallel import TensorParallel
from penstock.workers.trainer.engines.train_engine import (
    HOST,
    MOMENTS,
    NOTHING_KEPT,
    KeptState,
    give_back,
    make_adamw,
    moments_of,
    move_buffers,
    move_moments,
    num_steps,
    put_buffer,
    set_num_steps,
    set_params,
)
from penstock.workers.trainer.engines.ulysses import SequenceParallel, heads_of
from penstock.workers.trainer.models.language_model import PolicyModel, ScalarModel, decoder_layers
from penstock.workers.trainer.models.starting_weights import ALL, StartingWeights
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.checkpoint_form import CheckpointForm
from penstock.workers.weights.piece import Piece


class FsdpEngine:
    """A rank's shard of a model and of its optimizer. Every rank makes the same calls, since most of them
    communicate."""

    def __init__(
        self, model: PolicyModel | ScalarModel, weights: StartingWeights, ranks: Ranks, config: TrainerConfig
    ) -> None:
        """`model`: without weights, which each rank reads for its shards alone; where none requires gradients there is
        no optimizer."""
        num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
        self.model = model
        self.ranks = ranks
        # On a CPU everything is where offloading would put it, and there is nothing to pin memory for.
        self._is_offloaded = config.offload and ranks.device.type != "cpu"
        """True if weights and moments are in the host's memory all the time."""
        self.keeps_whole = num_bytes <= KEEP_WHOLE_BYTES and not self._is_offloaded
        self.mesh = RankMesh(ranks, config.shard_size, config.tensor_parallel_size)
        self.tensor = TensorParallel(model.lm, self.mesh) if config.tensor_parallel_size > 1 else None
        self.sequence: SequenceParallel | None = None
        if config.sequence_ranks > 1:
            sizes = config.split_sizes(heads_of(model.lm))
            groups = {size: ranks.process_group(config.tensor_parallel_size, size) for size in sizes if size > 1}
            self.sequence = SequenceParallel(model.lm, sizes, groups, config.tensor_parallel_size)
        self.optimizer: torch.optim.AdamW | None = None
        self._frozen = {f"weights/{name}" for name, one in model.lm.named_parameters() if not one.requires_grad}
        """Names of what is not trained."""
        self.host, self.frozen_host = HostBuffer(ranks.device), HostBuffer(ranks.device)
        """Host memory of the model: while an engine has the device, or all the time if it is offloaded."""
        self._left: dict[str, HostPart] = {}
        """Parts of it that hold what this rank has."""
        self.where = ""
        self.form = CheckpointForm(model.lm)
        self._stacked_form = CheckpointForm(model.lm, stacked=True)
        self.root = self._fully_shard(self.mesh.fsdp, config.dtype)
        self._load(weights, HOST if self._is_offloaded else ranks.device)
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for name, module in model.named_modules():
            if module in self.units:
                module.register_forward_pre_hook(partial(self._entered, name or "the embedding and the head"))
        if self.mesh.fsdp.size() > 1:
            for unit in self.units:
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_adamw(trained, config.optimizer) if trained else None

    def _fully_shard(self, mesh: DeviceMesh, dtype: str) -> FSDPModule:
        """Shard each decoder layer, then the rest; return the root."""
        policy = MixedPrecisionPolicy()
        if dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy() if self._is_offloaded else OffloadPolicy()
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
        for layer in decoder_layers(self.model):
            fully_shard(layer, reshard_after_forward=not self.keeps_whole, **options)
        root: FSDPModule = fully_shard(self.model, reshard_after_forward=False, **options)
        return root

    @torch.no_grad()
    def _load(self, weights: StartingWeights, device: torch.device) -> None:
        """Give the shards memory and their starting values. Buffers have theirs already, and are where `fully_shard`
        has moved them."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        if self._is_offloaded:  # page-locked memory, of which FSDP2 makes no page-locked copy
            self._replace_by(self._host_memory(dict(self._own_tensors())))
            self.model.to(device)
        else:
            self.model.to_empty(device=device)
        for name, buffer in buffers.items():
            put_buffer(self.model, name, buffer)
        for name, parameter in self.model.lm.named_parameters():
            rows, columns = self.place(parameter)
            weights.fill(local(parameter).detach(), hf_name(name), rows.start, columns)

    def _entered(self, name: str, *_: Any) -> None:
        self.where = name

    def take_device(self) -> None:
        self._move(self.ranks.device)
        self._left = {name: part for name, part in self._left.items() if name in self._frozen}

    def leave_device(self, kept: KeptState = NOTHING_KEPT) -> None:
        self.free()
        if not self._is_offloaded:
            self._replace_by(self._copied(kept))
        self._move(HOST)

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and moments, by the names of pieces of `state`."""
        for name, parameter in self.model.lm.named_parameters():
            yield f"weights/{name}", parameter
            state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
            yield from ((f"{moment}/{name}", state[moment]) for moment in MOMENTS if state)

    def _copied(self, kept: KeptState) -> KeptState:
        """`kept`, and all else as copies in this rank's host memory, which serves again the next time. What is not
        trained stays there, and is copied once."""
        missing = {name: tensor for name, tensor in self._own_tensors() if not holds(kept.get(name), tensor)}
        there = {*self._left}
        copies = self._host_memory(missing)
        for name, tensor in missing.items():
            if name not in there:
                copies[name].copy_(local(tensor).detach(), non_blocking=True)
        return {**kept, **copies}

    def _host_memory(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Host memory for what this rank has of these tensors. Those that have some keep it, with its values."""
        own = {name: local(tensor) for name, tensor in tensors.items()}
        for buffer, names in (
            (self.frozen_host, [name for name in own if name in self._frozen]),
            (self.host, [name for name in own if name not in self._frozen]),
        ):
            if buffer.is_free:
                buffer.reserve(sum(padded(own[name].nbytes) for name in names))
            for name in names:
                if name not in self._left:
                    self._left[name] = buffer.take(own[name].nbytes)
        return {name: self._left[name].memory.view(one.dtype).view(one.shape) for name, one in own.items()}

    @torch.no_grad()
    def _replace_by(self, kept: KeptState) -> None:
        """Give parameters and moments the memory of their kept values, where these are all that this rank has of them:
        `_move` finds them on the host."""
        for name, parameter in self.model.lm.named_parameters():
            if (own := with_memory(parameter, kept.get(f"weights/{name}"))) is not None and parameter.grad is None:
                swap_tensors(parameter, nn.Parameter(own, parameter.requires_grad))
            state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
            for moment in MOMENTS if state else ():
                if (own := with_memory(state[moment], kept.get(f"{moment}/{name}"))) is not None:
                    state[moment] = own

    def _move(self, device: torch.device) -> None:
        """Move weights with `Module.to`, which FSDP2 allows for its shards, and AdamW's states beside them. Those that
        are offloaded are where they have to be, and only buffers move."""
        if self._is_offloaded:
            move_buffers(self.model, device)
        else:
            self.model.to(device)
            move_moments(self.optimizer, device)
        give_back(self.ranks.device)

    def forward(self, *arguments: Any) -> Any:
        return self.sequence(self.model, *arguments) if self.sequence else self.model(*arguments)

    def split_over(self, size: int | None) -> None:
        if self.sequence:
            self.sequence.split_over(size)

    @property
    def split_sizes(self) -> list[int]:
        return self.sequence.sizes if self.sequence else [1]

    def before_backward(self, is_last: bool) -> None:
        """Let gradients of a minibatch add up unreduced until its last micro-batch, where they may be kept whole; else
        in shards, which only then are summed over copies."""
        if self.keeps_whole:
            self.root.set_requires_gradient_sync(is_last)
            self.root.set_reshard_after_backward(is_last)
            self.root.set_is_last_backward(is_last)
        elif self.mesh.num_copies > 1:
            self.root.set_requires_all_reduce(is_last)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def optimizer_step(self, params: AdamParams) -> float:
        assert self.optimizer is not None
        set_params(self.optimizer, params)
        if self.tensor:
            self.tensor.add_up_gradients()
        norm = self._grad_norm()
        value = float(norm)
        if math.isfinite(value):
            if params.grad_clip_norm:
                scale = (params.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
                for gradient in self._local_gradients():
                    gradient.mul_(scale)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def free(self) -> None:
        for unit in self.units:
            unit.reshard()

    def close(self) -> None:
        """Do nothing: nothing outlives this engine."""

    def _local_gradients(self, *, split: bool | None = None) -> list[Tensor]:
        """Gradients of this rank's shards, in the model's order; `split`: only those of parameters that tensor
        parallelism splits, or only the others'."""
        return [
            local(parameter.grad)
            for parameter in self.model.parameters()
            if parameter.grad is not None and split in (None, self._is_split(parameter))
        ]

    def _is_split(self, parameter: Tensor) -> bool:
        return self.tensor is not None and self.tensor.split_dim(parameter) is not None

    def _grad_norm(self) -> Tensor:
        """Norm of the whole gradient, `[]`, the same on every rank. Collective."""
        if self.ranks.num_ranks == 1:
            return nn.utils.get_total_norm(self._local_gradients())
        if self.tensor is None:
            square = nn.utils.get_total_norm(self._local_gradients()).square()
        else:  # what is not split is on T ranks, and counts once
            square = nn.utils.get_total_norm(self._local_gradients(split=True)).square()
            square += nn.utils.get_total_norm(self._local_gradients(split=False)).square() / self.tensor.size
        dist.all_reduce(square, group=self.ranks.group)
        return (square / self.mesh.num_copies).sqrt()

    # What lies where

    @torch.no_grad()
    def pieces(self, *, stacked: bool = False) -> Iterator[Piece]:
        form = self._stacked_form if stacked else self.form
        for piece in self._model_pieces():
            yield from form.pieces(piece)

    def _model_pieces(self) -> Iterator[Piece]:
        """Pieces of the weights, by the model's names. With LoRA or tensor parallelism values are copies, each made as
        it is asked for: never more than one tensor at a time."""
        lm = self.model.lm
        changes = {adapter.name: adapter for adapter in adapters(lm)}
        for own_name, parameter in lm.named_parameters():
            if is_adapter(own_name):
                continue
            name = hf_name(own_name)
            values = local(parameter)
            if name in changes:
                first = self._first_row(parameter)
                values = values + changes[name].delta(slice(first, first + len(values)))
            yield self._share(name, parameter, self._whole_columns(parameter, values))
        yield from buffer_pieces(lm, self.ranks.rank)

    @torch.no_grad()
    def adapter_pieces(self) -> Iterator[Piece]:
        policies = adapter_names(self.model.lm)
        for policy in policies:
            prefix = f"{policy}/" if len(policies) > 1 else ""
            for adapter in adapters(self.model.lm, policy):
                for name, parameter in adapter.tensors():
                    yield self._share(prefix + name, parameter, self._whole_columns(parameter, local(parameter)))

    def _whole_columns(self, parameter: Tensor, rows: Tensor) -> Tensor:
        """All columns of this rank's rows of a parameter. Collective where tensor parallelism splits them."""
        if self.tensor and self.tensor.split_dim(parameter) == 1:
            return self.tensor.whole_columns(rows)
        return rows

    def state(self) -> Iterator[Piece]:
        assert self.optimizer is not None
        for name, parameter in self.model.lm.named_parameters():
            if not parameter.requires_grad:
                continue
            moments = moments_of(self.optimizer, parameter)
            for kind, tensor in {"weights": parameter, **{moment: moments[moment] for moment in MOMENTS}}.items():
                yield self.own_piece(f"{kind}/{name}", parameter, local(tensor).detach(), tuple(parameter.shape))

    def num_optimizer_steps(self) -> int:
        return num_steps(self.optimizer, trained_parameters(self.model.lm))

    def loaded(self, num_optimizer_steps: int) -> None:
        assert self.optimizer is not None
        trained = trained_parameters(self.model.lm)
        set_num_steps(self.optimizer, num_optimizer_steps, trained)
        for parameter in trained:
            for tensor in (parameter, *(self.optimizer.state[parameter][moment] for moment in MOMENTS)):
                self.mesh.broadcast_shares(local(tensor).detach())
                if self.tensor and not self._is_split(parameter):
                    self.tensor.broadcast_first(local(tensor).detach())

    def place(self, parameter: Tensor) -> tuple[slice, slice]:
        """Rows and columns of a parameter that this rank has."""
        first = self._first_row(parameter)
        columns = ALL
        if self.tensor and self.tensor.split_dim(parameter) == 1:
            columns = self.tensor.columns(parameter.shape[1])
        return slice(first, first + (len(local(parameter)) if parameter.ndim else 1)), columns

    def _first_row(self, parameter: Tensor) -> int:
        """First of this rank's rows of a parameter: tensor parallelism cuts first, FSDP2 cuts what it leaves."""
        num_rows = parameter.shape[0] if parameter.ndim else 1
        if self.tensor and self.tensor.split_dim(parameter) == 0:
            num_rows //= self.tensor.size
            return self.tensor.rank * num_rows + first_row(num_rows, self.mesh.shard, self.mesh.num_shards)
        return first_row(num_rows, self.mesh.shard, self.mesh.num_shards)

    def _share(self, name: str, parameter: Tensor, rows: Tensor) -> Piece:
        """Whole rows for others to read. Each of the ranks that have the same rows gives a share."""
        share = self.mesh.share(len(rows), of_parts=self.tensor is not None and self.tensor.split_dim(parameter) != 0)
        shape = tuple(parameter.shape)
        first = (self._first_row(parameter) + share.start) * math.prod(shape[1:])
        return Piece(name, shape, first, rows[share].detach().reshape(-1))

    def own_piece(self, name: str, parameter: Tensor, rows: Tensor, shape: tuple[int, ...]) -> Piece:
        """This rank's box for others to read and to write. Each copy gives a share; of T ranks that have the same part,
        the first counts. `rows`: of the parameter, or of a tensor of this `shape` that is its first rows or columns."""
        share = self.mesh.share(len(rows))
        row_elements = math.prod(shape[1:])
        first = (self._first_row(parameter) + share.start) * row_elements
        if self.tensor:
            split_dim = self.tensor.split_dim(parameter)
            if split_dim == 1:
                first += self.tensor.rank * (row_elements // self.tensor.size)
            elif split_dim is None and self.tensor.rank > 0:
                share = slice(0, 0)
        return Piece(name, shape, first, rows[share])


def holds(values: Tensor | None, tensor: Tensor) -> bool:
    """Return whether values are all that this rank has of a tensor."""
    own = local(tensor)
    return values is not None and (values.shape, values.dtype) == (own.shape, own.dtype)


def with_memory(tensor: Tensor, values: Tensor | None) -> Tensor | None:
    """A tensor like this one in the host memory of its values; None where these are not all that this rank has."""
    if values is None or not holds(values, tensor):
        return None
    found = torch.empty_like(tensor.detach(), device=HOST)  # memory that is never touched
    local(found).set_(values.untyped_storage(), values.storage_offset(), values.shape, values.stride())
    return found


def buffer_pieces(lm: nn.Module, rank: int) -> Iterator[Piece]:
    """Persistent buffers, which every rank has whole: rank 0's count."""
    persistent = lm.state_dict().keys()
    for name, buffer in lm.named_buffers():
        if name in persistent:
            values = buffer.reshape(-1) if rank == 0 else buffer.reshape(-1)[:0]
            yield Piece(name, tuple(buffer.shape), 0, values, keeps_dtype=True)
