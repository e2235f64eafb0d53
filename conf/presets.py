"""Models by name: `model=tiny` stands for these keys.

A preset sets what a model needs to run at all (where it is, its numbers' type, the accelerator); what is learned on it
is the recipe's affair. On the command line a preset wins over the recipe; in a recipe, the recipe's own keys win over
the preset.
"""

from typing import Any

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"path": None, "fresh": {"max_position_embeddings": 2048}},
        "rollout": {
            "num_gpus_per_worker": 0,
            "tensor_parallel_size": 1,
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
        },
        "trainer": {"num_gpus_per_rank": 0, "dtype": "float32", "activation_checkpointing": False},
    },
    "qwen2.5-0.5b": {
        "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "rollout": {"num_gpus_per_worker": 1, "dtype": "bfloat16", "max_model_len": 4096, "enforce_eager": False},
        "trainer": {"num_gpus_per_rank": 1, "dtype": "bfloat16", "activation_checkpointing": True},
    },
    "qwen2.5-1.5b": {
        "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct"},
        "rollout": {"num_gpus_per_worker": 1, "dtype": "bfloat16", "max_model_len": 4096, "enforce_eager": False},
        "trainer": {"num_gpus_per_rank": 1, "dtype": "bfloat16", "activation_checkpointing": True},
    },
}
"""Presets by name. `tiny`: a fresh Qwen2 of about 3M parameters with a character tokenizer, on a CPU. The others: hub
models, one GPU an actor."""
