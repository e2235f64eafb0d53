"""Tiny mixtures of experts with random weights and the character tokenizer, as HF model directories."""

from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import EOS_ID, PAD_ID, character_tokenizer, vocabulary_size

FRESH = FreshModelConfig(max_position_embeddings=64)
SIZES: dict[str, Any] = {
    "vocab_size": vocabulary_size(FRESH), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "initializer_range": 0.3,
    "num_experts_per_tok": 2, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "bos_token_id": None, "dtype": "float32",
}  # fmt: skip
MIXTURES = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, intermediate_size=48, norm_topk_prob=True)
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=16, sliding_window=None)
    ),
}


def build_mixture(kind: str, path: Path, seed: int = 1) -> str:
    """Save one of `MIXTURES` and return its directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        MIXTURES[kind]().save_pretrained(path)
    character_tokenizer(FRESH).save_pretrained(path)
    return str(path)
