"""Sizes of models that people plan with before they have them: facts of their config.json, by the hub's names."""

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
    "meta-llama/Llama-3.1-8B": ("llama", 32, 4096, 32, 8, 128, 14336, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.1-70B": ("llama", 80, 8192, 64, 8, 128, 28672, LLAMA_VOCABULARY, False),
    "meta-llama/Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 64, 8192, LLAMA_VOCABULARY, True),
    "meta-llama/Llama-3.2-3B": ("llama", 28, 3072, 24, 8, 128, 8192, LLAMA_VOCABULARY, True),
}
ENDINGS = ("-Instruct", "-Base", "-Instruct-2507", "-Thinking-2507")
"""Ends of names that change no size."""


def known_shape(name: str) -> ModelShape | None:
    """Sizes of a model of the hub; None for one that is not known here."""
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    sizes = _SIZES.get(name.replace("Qwen2.5-Math", "Qwen2.5"))
    if sizes is None:
        return None
    kind, layers, hidden, heads, kv_heads, head_dim, width, vocabulary, is_tied = sizes
    values = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": width,
        "moe_intermediate_size": width, "vocab_size": vocabulary, "tie_word_embeddings": is_tied,
        "max_position_embeddings": 131072 if kind == "llama" else 32768,
    }  # fmt: skip
    if kind == "qwen2_5_vl":
        values["vision_config"] = TOWER | {"out_hidden_size": hidden}
    return ModelShape.of(values | (MIXTURE if kind == "qwen3_moe" else {}))
