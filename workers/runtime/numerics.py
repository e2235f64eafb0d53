"""What decides the bits that a process computes, besides its code and its input: processor, device, libraries and their
settings. It becomes part of a run's manifest (`orchestrator/observability/manifest.py`)."""

import os
import re
from pathlib import Path
from typing import Any

from penstock.workers.runtime.processes import cpu_entry

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS", "DNNL_", "GOMP_", "KMP_", "MKL_", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32",
    "OMP_", "ONEDNN_", "PYTORCH_", "TORCHINDUCTOR_", "VLLM_ATTENTION", "VLLM_BATCH_INVARIANT",
)  # fmt: skip
"""Beginnings of the names of variables that choose kernels, or how sums are split."""
LIBRARIES = re.compile(r"Math Kernel Library|MKL-DNN|OpenMP|CPU capability|LAPACK|CUDA Runtime|CuDNN")
DRIVER = Path("/proc/driver/nvidia/version")


def numerics(attention: str | None = None) -> dict[str, Any]:
    """Facts of this process, plain data. `attention`: the kernel that a model was opened with, where it is known."""
    import torch  # late: other callers of this folder need none

    found: dict[str, Any] = {
        "cpu": cpu_entry("model name"),
        "libraries": [line.strip(" -") for line in torch.__config__.show().splitlines() if LIBRARIES.search(line)],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "onednn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)},
    }
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "driver": next(iter(DRIVER.read_text().splitlines()), "") if DRIVER.is_file() else "",
            "cudnn": f"deterministic={torch.backends.cudnn.deterministic} benchmark={torch.backends.cudnn.benchmark}",
            "sdp": [
                name
                for name in ("flash", "mem_efficient", "cudnn", "math")
                if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            ],
        }
    return found | ({"attention": attention} if attention else {})
