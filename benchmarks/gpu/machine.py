"""Common parts of the benchmarks for GPUs: whether there is one, and models of real sizes with random weights.

Nothing is downloaded. Without a GPU every benchmark of this folder ends with one line and exit code 2.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import EOS_ID, character_tokenizer, model_config

NO_GPU = 2
"""Exit code without a GPU."""
VOCABULARY = 151_936
"""Vocabulary of Qwen2: the output layer is a large part of a small model's work and weights."""
INITIALIZER_RANGE = 0.05
"""Standard deviation of the weights, wide enough that distributions over tokens are far from even, so that wrong
weights show."""
SIZES = {
    "0.5b": FreshModelConfig(
        num_layers=24, hidden_size=896, intermediate_size=4864, num_heads=14, num_kv_heads=2,
        max_position_embeddings=4096, initializer_range=INITIALIZER_RANGE,
    ),
    "1.5b": FreshModelConfig(
        num_layers=28, hidden_size=1536, intermediate_size=8960, num_heads=12, num_kv_heads=2,
        max_position_embeddings=4096, initializer_range=INITIALIZER_RANGE,
    ),
    "small": FreshModelConfig(
        num_layers=2, hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=1,
        max_position_embeddings=4096, initializer_range=INITIALIZER_RANGE,
    ),
}  # fmt: skip
"""Qwen2's sizes by name; `small` is for `--quick`."""


def count_gpus(benchmark: str) -> int:
    """Count the GPUs that torch can use. Ends the process if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        print(
            f"benchmarks.gpu.{benchmark}: torch {torch.__version__} finds no GPU on this machine; nothing was measured "
            "(docs/gpu.md).",
            file=sys.stderr,
        )
        raise SystemExit(NO_GPU)
    return count


def gpu_names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def write_model(directory: Path, size: str, device: torch.device) -> int:
    """Write a HF model directory, float32, random. Returns the number of parameters. `device`: where it is drawn."""
    from transformers import Qwen2ForCausalLM

    sizes = SIZES[size]
    with device:
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(model_config(sizes, VOCABULARY)).float()
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(directory)
    character_tokenizer(sizes).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
