"""DeepSpeed's ZeRO around a model: float32 masters and AdamW in flat partitions, gradients that add up.

Stage 1 shards optimizer states and masters, stage 2 gradients, too, stage 3 weights, too. DeepSpeed wants to own the
training loop: it averages over ranks, counts micro-batches, clips, and skips steps. Here its settings make all of that
the same mathematics as FSDP2's (`fsdp.py`). A `TrainEngine` (`train_engine.py`).

Where ZeRO keeps a parameter, which elements of it this rank has, and in which flat tensor:

    stages 1, 2   all trained parameters end to end, cut into one partition a rank: a cut goes through a parameter
    stage 3       each parameter cut into equal parts, one a rank; a rank's parts end to end

The flat tensors are float32 masters, and AdamW's moments are flat tensors of the same order. Read from DeepSpeed's
optimizers, since its public `safe_get_local_*` exist for stage 3 only and may return copies.

DeepSpeed is imported late, inside an actor. It expects to be started by its own launcher, which sets environment
variables, and compiles C++ extensions when first used.
"""

import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import AdamParams
from penstock.workers.trainer.engines.fsdp import buffer_pieces
from penstock.workers.trainer.engines.train_engine import (
    HOST,
    MOMENTS,
    NOTHING_KEPT,
    KeptState,
    give_back,
    make_adamw,
    moments_of,
    move_buffers,
    move_masters,
    move_moments,
    num_steps,
    set_num_steps,
    set_params,
)
from penstock.workers.trainer.models.language_model import PolicyModel, ScalarModel, decoder_layers
from penstock.workers.trainer.models.starting_weights import StartingWeights, replace_parameters
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.checkpoint_form import CheckpointForm
from penstock.workers.weights.piece import Piece

MAX_BUCKET_ELEMENTS = 2**27
"""Largest number of gradients (float32) that are copied together to be reduced: half a GiB."""
PERSISTENT_ELEMENTS = 100_000
"""Largest parameters that stay gathered from their first use to the next optimizer step (stage 3). Gathering norms and
biases costs more than keeping them."""
UNUSED_EXTENSIONS = ("deepspeed_shm_comm",)
"""Extensions that the C++ compiler builds when ranks meet, and that are used for inference only."""


def load_deepspeed(ranks: Ranks) -> ModuleType:
    """Import the package, computing on the ranks' device. Raises `ConfigError` where it is not installed or computes
    elsewhere."""
    device = ranks.device
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read once, when imported; it would guess
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"trainer.engine=deepspeed: the package cannot be imported ({error}): pip install "
            "'penstock[deepspeed]', or take trainer.engine=fsdp."
        ) from error
    name = deepspeed.get_accelerator().device_name()
    if name != device.type:
        raise ConfigError(
            f"trainer.engine=deepspeed: DeepSpeed computes on {name}, this trainer on {device.type}. Set "
            f"DS_ACCELERATOR={device.type} in the environment, or change trainer.num_gpus_per_rank."
        )
    for extension in UNUSED_EXTENSIONS:
        deepspeed.ops.__compatible_ops__[extension] = False
    # It calls functions of torch.distributed by the names that they had: one warning a collective.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
    _take_place_of_launcher(ranks)
    return deepspeed


def _take_place_of_launcher(ranks: Ranks) -> None:
    """Set the environment variables that DeepSpeed's launcher would have set, and that DeepSpeed reads repeatedly.
    Those that this process has inherited of another launcher say nothing about this trainer."""
    own = {"RANK": ranks.rank, "WORLD_SIZE": ranks.num_ranks, "LOCAL_RANK": ranks.device.index or 0}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)


def load_sharded(
    deepspeed: Any,
    model: PolicyModel | ScalarModel,
    weights: StartingWeights,
    settings: dict[str, Any],
    dtype: torch.dtype,
    ranks: Ranks,
) -> None:
    """Give one layer after the other its weights and cut it (stage 3), so that no process ever holds the whole model,
    as it would if DeepSpeed were given it whole. DeepSpeed cuts what rank 0 has, so that the others need not read it.
    Collective.
    """
    for module in (*decoder_layers(model), model):
        fill_parameters(model.lm, module, weights if ranks.rank == 0 else None, dtype)
        deepspeed.zero.Init(module=module, config_dict_or_path=settings, dtype=dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(ranks.device)


def fill_parameters(lm: nn.Module, module: nn.Module, weights: StartingWeights | None, dtype: torch.dtype) -> None:
    """Give the parameters of `module`, a part of `lm`, that have no values yet all of theirs, on the CPU. `weights`
    None: any values."""
    within = set(module.parameters())

    def made(name: str, parameter: nn.Parameter) -> nn.Parameter:
        whole = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad)
        if weights is not None:
            weights.fill(whole.detach(), name)
        return whole

    replace_parameters(lm, lambda _, parameter: parameter.is_meta and parameter in within, made)


def set_group_timeouts(engine: Any, timeout_s: float) -> None:
    """Give the process groups that DeepSpeed makes the trainer's timeout, in the place of torch's default.

    `engine`: what `deepspeed.initialize` returned.
    """
    for process_group in (engine.data_parallel_group, engine.seq_data_parallel_group):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), process_group)


def settings(config: TrainerConfig, device_type: str, num_trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration. `num_trained`: elements of the parameters that get an optimizer."""
    on_gpu = device_type == "cuda"
    zero: dict[str, Any] = {
        "stage": config.deepspeed.zero_stage,
        "reduce_bucket_size": max(1, min(num_trained, MAX_BUCKET_ELEMENTS)),
        "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
    }
    if config.offload and num_trained:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    return {
        "train_micro_batch_size_per_gpu": 1,  # the trainer counts micro-batches
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW is as good on a CPU, and needs no compiler
        "bf16": {"enabled": config.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


OF_STAGE_3 = ("lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names of what it can move at stage 3, whichever optimizer there is."""


class DeepSpeedEngine:
    """A rank of a model under ZeRO. Every rank makes the same calls, since most of them communicate.

    Without parameters that require gradients there is no optimizer; stage 3 shards such a model all the same, stages 1
    and 2 leave it whole on every rank.
    """

    def __init__(
        self, model: PolicyModel | ScalarModel, weights: StartingWeights, ranks: Ranks, config: TrainerConfig
    ) -> None:
        """`model`: without weights. Stage 3 gives it one layer's at a time, and keeps the shards; stages 1 and 2 keep
        all of them on every rank, by their nature. Raises `ConfigError` where DeepSpeed is not installed or computes
        elsewhere."""
        self.model = model
        self.ranks = ranks
        self.form = CheckpointForm(model.lm)
        self._stacked_form = CheckpointForm(model.lm, stacked=True)
        self.stage = config.deepspeed.zero_stage
        self._is_offloaded = config.offload
        num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self.optimizer: torch.optim.AdamW | None = None
        self.where = ""
        self.deepspeed: Any = None
        self._fragments: dict[str, Fragment] = {}
        self._earlier: dict[int, list[Tensor]] = {}
        """Gradients of earlier calls since the last step, by group (stages 1 and 2)."""
        self._is_last = self._has_gradients = False
        dtype = getattr(torch, config.dtype)
        if self.stage < 3:
            fill_parameters(model.lm, model.lm, weights, dtype)
        if not num_trained and self.stage < 3:
            model.to(ranks.device)
            return
        how = settings(config, ranks.device.type, num_trained)
        deepspeed = load_deepspeed(ranks)
        if self.stage == 3:
            load_sharded(deepspeed, model, weights, how, dtype, ranks)
        trained = {name: parameter for name, parameter in model.lm.named_parameters() if parameter.requires_grad}
        if trained:
            self.optimizer = make_adamw(list(trained.values()), config.optimizer)
        self.deepspeed, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=how, dist_init_required=False
        )
        set_group_timeouts(self.deepspeed, config.collective_timeout_s)
        if self.optimizer is not None:
            self._fragments = {
                name: fragment_of(name, parameter, self.deepspeed.optimizer, ranks.rank)
                for name, parameter in trained.items()
            }
            if config.dtype == "bfloat16":  # which DeepSpeed has copied into its masters
                for fragment in self._fragments.values():
                    weights.fill_elements(fragment.piece().values, fragment.name, fragment.first)

    def take_device(self) -> None:
        """Bring the model back, and what DeepSpeed has of it."""
        if self.optimizer is not None:
            self.deepspeed.reload_states()
        self._move(self.ranks.device)

    def leave_device(self, kept: KeptState = NOTHING_KEPT) -> None:
        """Bring the model to the host's memory, and what DeepSpeed has of it. All is copied: its masters are flat, and
        what is kept is cut by parameters."""
        self.free()
        if self.optimizer is not None:
            # Stage 3 moves masters and moments of DeepSpeed's own AdamW alone: `_move` does that.
            include = OF_STAGE_3 if self.stage == 3 else None
            self.deepspeed.offload_states(include=include, pin_memory=False)
        self._move(HOST)

    def _move(self, device: torch.device) -> None:
        """Move what DeepSpeed's `offload_states` leaves where it is."""
        move_buffers(self.model, device)
        if self.optimizer is None and self.stage < 3:
            self.model.to(device)
        elif self.optimizer is None:
            parameters: Iterator[Any] = self.model.parameters()
            for parameter in parameters:
                parameter.ds_tensor.data = parameter.ds_tensor.data.to(device)
        elif self.stage == 3 and not self._is_offloaded:
            move_masters(self.optimizer, device)
            move_moments(self.optimizer, device)
        give_back(self.ranks.device)

    def forward(self, *arguments: Any) -> Any:
        return (self.deepspeed or self.model)(*arguments)

    def split_over(self, size: int | None) -> None:
        """Do nothing: ranks of DeepSpeed split no rows."""

    @property
    def split_sizes(self) -> list[int]:
        return [1]

    def before_backward(self, is_last: bool) -> None:
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        self._is_last = is_last
        if self._has_gradients and self.stage < 3:  # which would take the next gradients for all of them
            if self._is_offloaded:
                raise ConfigError(
                    "trainer.offload=true: ZeRO's stages 1 and 2 do not add up gradients of several calls of "
                    "forward_backward in the host's memory. Set trainer.deepspeed.zero_stage=3, or "
                    "trainer.offload=false, or step after each call."
                )
            held = self.deepspeed.optimizer.averaged_gradients
            self._earlier = {group: [one.clone() for one in held[group]] for group in held}
            held.update(dict.fromkeys(held))
        self._has_gradients = False

    def backward(self, loss: Tensor) -> None:
        """Run backward on the loss times the number of ranks, because ZeRO divides by it what it sums."""
        self.deepspeed.backward(loss * self.ranks.num_ranks, scale_wrt_gas=False)
        if self._is_last:
            self._has_gradients = True
            for group, tensors in self._earlier.items():
                for sum_, one in zip(self.deepspeed.optimizer.averaged_gradients[group], tensors, strict=True):
                    sum_.add_(one)
            self._earlier = {}

    def optimizer_step(self, params: AdamParams) -> float:
        assert self.optimizer is not None
        set_params(self.optimizer, params)
        self.deepspeed.optimizer.clip_grad = params.grad_clip_norm
        self._has_gradients = False
        self.deepspeed.step()
        norm = float(self.deepspeed.get_global_grad_norm())
        return norm if math.isfinite(norm) and norm >= 0 else math.inf

    def free(self) -> None:
        if self.stage == 3:
            self.deepspeed.optimizer.empty_partition_cache()  # the engine's own collects garbage each time

    def close(self) -> None:
        """Take hooks off the model."""
        engine, self.deepspeed = self.deepspeed, None
        if engine is not None:
            engine.destroy()

    # What lies where

    def pieces(self, *, stacked: bool = False) -> Iterator[Piece]:
        """Pieces of all weights; trained ones as their float32 masters have them."""
        form = self._stacked_form if stacked else self.form
        for name, parameter in self.model.lm.named_parameters():
            fragment = self._fragments.get(name)
            if fragment is not None:
                yield from form.pieces(fragment.piece())
            else:
                yield from form.pieces(frozen_piece(name, parameter, self.ranks.rank, self.ranks.num_ranks))
        for piece in buffer_pieces(self.model.lm, self.ranks.rank):
            yield from form.pieces(piece)

    def adapter_pieces(self) -> Iterator[Piece]:
        """No pieces: `conf/trainer.py` has adapters for fsdp only."""
        return iter(())

    def state(self) -> Iterator[Piece]:
        assert self.optimizer is not None
        for fragment in self._fragments.values():
            yield fragment.piece("weights/")
            moments = moments_of(self.optimizer, fragment.flat)
            for moment in MOMENTS:
                yield fragment.piece(f"{moment}/", moments[moment])

    def num_optimizer_steps(self) -> int:
        return num_steps(self.optimizer)

    @torch.no_grad()
    def loaded(self, num_optimizer_steps: int) -> None:
        set_num_steps(self.optimizer, num_optimizer_steps)
        if self.stage < 3:
            self.deepspeed.optimizer.update_lp_params()
            return
        for fragment in self._fragments.values():
            fragment.refresh_shard()
        self.free()


@dataclass(frozen=True)
class Fragment:
    """Elements of a trained parameter that this rank has: `[first, first + count)` of the flattened parameter."""

    name: str
    shape: tuple[int, ...]
    first: int
    count: int
    """The number of elements; 0: this rank has none."""
    flat: Tensor
    """The masters of many parameters; float32."""
    offset: int
    """Place of the first element in `flat`, and in each moment."""
    shard: Tensor | None = None
    """Elements of this rank in the compute dtype, which parameters are gathered from (stage 3)."""

    def piece(self, prefix: str = "", flat: Tensor | None = None) -> Piece:
        """The piece of the master, or of another tensor in its order. Shares memory with it."""
        source = (self.flat if flat is None else flat).detach()
        return Piece(prefix + self.name, self.shape, self.first, source.narrow(0, self.offset, self.count))

    def refresh_shard(self) -> None:
        """Bring the compute dtype's elements up to date with the master (stage 3)."""
        assert self.shard is not None
        self.shard.narrow(0, 0, self.count).copy_(self.piece().values)


def fragment_of(name: str, parameter: Any, zero: Any, rank: int) -> Fragment:
    """The fragment of a trained parameter. `zero`: DeepSpeed's optimizer around AdamW."""
    if hasattr(parameter, "ds_tensor"):  # stage 3; the last ranks' parts are padded, and may be only padding
        index, offset, part = zero.grad_position[zero.get_param_id(parameter)]
        first, count = _part(parameter.ds_numel, part, rank)
        flat = zero.fp32_partitioned_groups_flat[index]
        return Fragment(name, tuple(parameter.ds_shape), first, count, flat, offset, parameter.ds_tensor)
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping
    (flat,) = zero.optimizer.param_groups[0]["params"]
    if mapping is None:
        return Fragment(name, shape, 0, 0, flat, 0)
    part, place = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Fragment(name, shape, part.start, part.numel, flat, place.start)


def frozen_piece(name: str, parameter: Any, rank: int, num_ranks: int) -> Piece:
    """The piece of a parameter without optimizer: this rank's shard in stage 3, otherwise an equal part of what all
    have."""
    sharded = hasattr(parameter, "ds_tensor")
    shape = tuple(parameter.ds_shape if sharded else parameter.shape)
    num_elements = parameter.ds_numel if sharded else parameter.numel()
    part = parameter.ds_tensor.numel() if sharded else -(-num_elements // num_ranks)
    first, count = _part(num_elements, part, rank)
    if sharded:
        return Piece(name, shape, first, parameter.ds_tensor.detach().narrow(0, 0, count))
    return Piece(name, shape, first, parameter.detach().reshape(-1).narrow(0, first, count))


def _part(num_elements: int, part: int, rank: int) -> tuple[int, int]:
    """First element and number of elements of a rank's part, where all but the last are `part` long."""
    first = min(num_elements, rank * part)
    return first, min(part, num_elements - first)
