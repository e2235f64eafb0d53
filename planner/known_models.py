"""Sizes of models that people plan with before they have them: facts of their config.json, by the hub's names."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.orchestrator.configuration.memory.model_shape import ModelShape

QWEN2_VOCABULARY, QWEN3_VOCABULARY, LLAMA_VOCABULARY = 151936, 151936, 128256
MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8}
TOWER = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
"""What sees in Qwen2.5-VL, of whichever size."""
# kind, layers, hidden, heads, heads of keys and values, width of a head, width of an MLP or an expert, vocabulary, tied
_SIZES: Mapping[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 24, 896, 14, 2, 64, 4864, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 36, 2048, 16, 2, 128, 11008, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 48, 5120, 40, 8, 128, 13824, 152064, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
    "Qwen/Qwen2.5-72B": ("qwen2", 80, 8192, 64, 8, 128, 29568, 152064, False),
    "Qwen/Qwen2.5-VL-3B": ("qwen2_5_vl", 36, 2048, 16, 2, 128, 11008, QWEN2_VOCABULARY, True),
    "Qwen/Qwen2.5-VL-7B": ("qwen2_5_vl", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "Qwen/Qwen3-0.6B": ("qwen3", 28, 1024, 16, 8, 128, 3072, QWEN3_VOCABULARY, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 28, 2048, 16, 8, 128, 6144, QWEN3_VOCABULARY, True),
    "Qwen/Qwen3-4B": ("qwen3", 36, 2560, 32, 8, 128, 9728, QWEN3_VOCABULARY, True),
    "Qwen/Qwen3-8B": ("qwen3", 36, 4096, 32, 8, 128, 12288, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-14B": ("qwen3", 40, 5120, 40, 8, 128, 17408, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-32B": ("qwen3", 64, 5120, 64, 8, 128, 25600, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 32, 4, 128, 768, QWEN3_VOCABULARY, False),
    "Qwen/Qwen3-235B-A22B": ("qwen3_moe", 94, 4096, 64, 4, 128, 1536, QWEN3_VOCABULARY, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", 28, 1536, 12, 2, 128, 8960, QWEN2_VOCABULARY, False),
    "meta-llama/Llama-3.1-8B": ("llama", 32, 4096, 32, 8, 128, 14336, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.1-70B": ("llama", 80, 8192, 64, 8, 128, 28672, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.1-405B": ("llama", 126, 16384, 128, 8, 128, 53248, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 64, 8192, LLAMA_VOCABULARY, True),
    "meta-llama/Llama-3.2-3B": ("llama", 28, 3072, 24, 8, 128, 8192, LLAMA_VOCABULARY, True),
    "mistralai/Mistral-7B": ("mistral", 32, 4096, 32, 8, 128, 14336, 32768, False),
    "mistralai/Mistral-Nemo": ("mistral", 40, 5120, 32, 8, 128, 14336, 131072, False),
    "mistralai/Mistral-Small-24B": ("mistral", 40, 5120, 32, 8, 128, 32768, 131072, False),
    "google/gemma-2-2b": ("llama", 26, 2304, 8, 4, 256, 9216, 256000, True),
    "google/gemma-2-9b": ("llama", 42, 3584, 16, 8, 256, 14336, 256000, True),
    "google/gemma-2-27b": ("llama", 46, 4608, 32, 16, 128, 36864, 256000, True),
    "google/gemma-3-1b": ("llama", 26, 1152, 4, 1, 256, 6912, 262144, True),
    "google/gemma-3-4b": ("llama", 34, 2560, 8, 4, 256, 10240, 262208, True),
    "google/gemma-3-12b": ("llama", 48, 3840, 16, 8, 256, 15360, 262208, True),
    "google/gemma-3-27b": ("llama", 62, 5376, 32, 16, 128, 21504, 262208, True),
}
"""Gemma's layers have two more norms than Llama's, a ten-thousandth of their parameters. Of models that see, except
Qwen2.5-VL, it is the text."""
_BY_NAME = {name.rpartition("/")[2].lower(): sizes for name, sizes in _SIZES.items()}
NO_SIZE = re.compile(r"-(instruct|base|thinking|chat|it|pt|v0\.\d|2[45]\d\d)(?=-|$)")
"""Parts of names that change no size."""
LIKE = (
    (r"^qwen2\.5-(math|coder)-", "qwen2.5-"), (r"^qwen2-(?!vl)", "qwen2.5-"), (r"^qwen3-coder-", "qwen3-"),
    (r"^(meta-)?llama-3(\.[13])?-", "llama-3.1-"), (r"^deepseek-r1-distill-llama-", "llama-3.1-"),
    (r"^deepseek-r1-distill-qwen-(?!1\.5b)", "qwen2.5-"),
)  # fmt: skip
"""Beginnings of names of models that have the sizes of others."""


def known_shape(name: str) -> ModelShape | None:
    """Sizes of a model of the hub, by the last part of its name; None for one that is not known here."""
    name = NO_SIZE.sub("", name.rpartition("/")[2].lower())
    for pattern, other in LIKE:
        name = re.sub(pattern, other, name)
    sizes = _BY_NAME.get(name)
    if sizes is None:
        return None
    kind, layers, hidden, heads, kv_heads, head_dim, width, vocabulary, is_tied = sizes
    values = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": width,
        "moe_intermediate_size": width, "vocab_size": vocabulary, "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768 if kind.startswith("qwen") else 131072,
    }  # fmt: skip
    if kind == "qwen2_5_vl":
        values["vision_config"] = TOWER | {"out_hidden_size": hidden}
    return ModelShape.of(values | (MIXTURE if kind == "qwen3_moe" else {}))
