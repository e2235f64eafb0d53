"""DeepSpeed as a library inside an actor: imported late, told where it is, and what to do.

It expects to be started by its own launcher, which sets environment variables, and compiles C++ extensions when first
used. Called by `deepspeed.py`.
"""

import os
import warnings
from types import ModuleType
from typing import Any

import torch

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import TrainerConfig

MAX_BUCKET_ELEMENTS = 2**27
"""Most gradients (float32) that are copied together to be reduced: half a GiB."""
PERSISTENT_ELEMENTS = 100_000
"""Stage 3: parameters up to this size stay gathered from their first use to the next optimizer step. Gathering norms
and biases costs more than keeping them."""
UNUSED_EXTENSIONS = ("deepspeed_shm_comm",)
"""Built by the C++ compiler when ranks meet, and used for inference only."""


def load_deepspeed(device: torch.device) -> ModuleType:
    """The package, computing on `device`. Raises `ConfigError` where it is not installed or computes elsewhere."""
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
    _take_place_of_launcher(device)
    return deepspeed


def _take_place_of_launcher(device: torch.device) -> None:
    """DeepSpeed's launcher tells it the index of its device, in an environment variable that is read time and again.
    What this process has inherited of another launcher says nothing about it. Ranks and addresses are read from
    torch.distributed."""
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)


def settings(config: TrainerConfig, device_type: str, num_trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration. `num_trained`: elements of the parameters that get an optimizer."""
    on_gpu = device_type == "cuda"
    zero: dict[str, Any] = {
        "stage": config.deepspeed.zero_stage,
        "reduce_bucket_size": max(1, min(num_trained, MAX_BUCKET_ELEMENTS)),
        "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
    }
    if config.deepspeed.offload_optimizer and num_trained:
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
