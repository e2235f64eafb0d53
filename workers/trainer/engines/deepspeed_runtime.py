"""DeepSpeed as a library inside an actor: imported late, told where it is, and what to do.

DeepSpeed expects to be started by its own launcher, which sets environment variables, and compiles C++ extensions when
first used.
"""

import os
import warnings
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.models.language_model import PolicyModel, ScalarModel, decoder_layers
from penstock.workers.trainer.models.starting_weights import StartingWeights, replace_parameters
from penstock.workers.trainer.ranks import Ranks

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
            f"trainer.engine=deepspeed: the package cannot be imported ({error}). Install deepspeed, or take "
            "trainer.engine=fsdp."
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
        load_whole(model.lm, module, weights if ranks.rank == 0 else None, dtype)
        deepspeed.zero.Init(module=module, config_dict_or_path=settings, dtype=dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(ranks.device)


def load_whole(lm: nn.Module, module: nn.Module, weights: StartingWeights | None, dtype: torch.dtype) -> None:
    """Give the parameters of `module`, a part of `lm`, that have no values yet all of theirs, on the CPU. `weights`
    None: any values."""
    within = set(module.parameters())

    def made(name: str, parameter: nn.Parameter) -> nn.Parameter:
        whole = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad)
        if weights is not None:
            weights.fill(whole.detach(), name)
        return whole

    replace_parameters(lm, lambda _, parameter: parameter.is_meta and parameter in within, made)


def keep_deadline(engine: Any, timeout_s: float) -> None:
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
