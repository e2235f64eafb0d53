"""The model that is trained, the shape of a model that is made from nothing, and models by name: `model=tiny` stands
for some keys.

A preset sets what a model needs to run at all (where it is, its numbers' type, the accelerator); what is learned on it
is the recipe's affair. On the command line a preset wins over the recipe; in a recipe, the recipe's own keys win over
the preset.
"""

from dataclasses import dataclass, field
from typing import Any

from penstock.conf.checks import POSITIVE, check_bounds, one_of, within
from penstock.conf.errors import ConfigError, ModelError

TEMPLATE_ARGUMENTS = ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template")


@dataclass
class FreshModelConfig:
    """A small Qwen2, with experts a Qwen3-MoE, with a vision tower a Qwen2.5-VL, with random weights and a character
    tokenizer, for runs that bring no model (`model=tiny`)."""

    num_layers: int = 4
    """Layers of the decoder."""
    hidden_size: int = 256
    """Width of the hidden states, a multiple of twice the heads. The default has 3M parameters, which learn sums on two
    cores."""
    intermediate_size: int = 704
    """Neurons of a layer's MLP, or of each of its experts."""
    num_experts: int = 0
    """Experts of each layer, a mixture. 0: none, each layer has one MLP."""
    experts_per_token: int = 2
    """Experts that a token is sent to, where there are any. Two learn sooner than one: the router then gets a gradient
    from how they compare."""
    num_vision_layers: int = 0
    """Layers of a vision tower, for runs with pictures (rollout.max_pictures). 0: none, the model reads text."""
    vision_hidden_size: int = 64
    """Width of the tower, a multiple of 32: its heads have 32 numbers each."""
    num_heads: int = 4
    """Heads of attention of each layer."""
    num_kv_heads: int = 2
    """Heads of keys and values, a divisor of num_heads: each serves equally many."""
    max_position_embeddings: int = 1024
    """Longest sequence in tokens. Bounds prompt + response."""
    initializer_range: float = 0.02
    """Standard deviation of the random weights. Narrow models (hidden size 128) learn sooner from 0.06."""
    words: list[str] = field(default_factory=list)
    """Strings that are one token each besides the characters, e.g. the fixed words of the prompts."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "model.fresh",
            num_layers=1, hidden_size=1, intermediate_size=1, num_heads=1, num_kv_heads=1,
            max_position_embeddings=16, num_experts=0, experts_per_token=1, num_vision_layers=0,
            initializer_range=POSITIVE,
        )  # fmt: skip
        if self.num_experts:
            within("model.fresh.experts_per_token", self.experts_per_token, 1, self.num_experts)
        if self.num_vision_layers and self.num_experts:
            raise ConfigError("model.fresh: it has a vision tower or experts, not both. Set one of the numbers to 0.")
        if self.vision_hidden_size < 32 or self.vision_hidden_size % 32:
            raise ConfigError(
                f"model.fresh.vision_hidden_size={self.vision_hidden_size} must be a multiple of 32, a head's width."
            )


@dataclass
class ModelConfig:
    """The policy (and, unless set apart, the reference)."""

    path: str | None = None
    """Directory of a HF model, or a hub id. `null`: a fresh model of `model.fresh` is made in the run directory."""
    fresh: FreshModelConfig = field(default_factory=FreshModelConfig)
    reference_path: str | None = None
    """Model of the `reference` stage. `null`: the policy as it was at the start of the run."""
    paths: dict[str, str] = field(default_factory=dict)
    """Further models that the dataflow names, by name: {teacher: DIRECTORY}. Also where one of several policies starts
    from, if they are whole models (trainer.policies)."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the policy's chat template besides messages and tools, for prompts and in environments:
    {enable_thinking: false} has Qwen3 answer at once, {date_string: 26 Jul 2024} has Llama 3 write the same prompt
    every day. Empty: the template's own defaults."""
    attention: str = "sdpa"
    """Attention implementation of the trainer (transformers' name): sdpa, eager, flash_attention_2."""

    def __post_init__(self) -> None:
        one_of("model.attention", self.attention, ("sdpa", "eager", "flash_attention_2"))
        for name in self.chat_template_kwargs:
            if name in TEMPLATE_ARGUMENTS:
                raise ConfigError(
                    f"model.chat_template_kwargs.{name}: the template is told this of each conversation. Leave it out."
                )

    def path_of(self, model: str, policy_path: str) -> str:
        """Path of a model that is not trained; the reference is the policy's start unless it is set apart. Raises
        `ModelError`."""
        path = self.paths.get(model)
        if path is None and model == "reference":
            return self.reference_path or policy_path
        if path is None:
            raise ModelError(
                f"the dataflow asks for the model {model!r}, and model.paths says nothing of it. Set "
                f"model.paths.{model} to the directory of a HF model."
            )
        return path


ON_GPU: dict[str, dict[str, Any]] = {
    "rollout": {"num_gpus_per_worker": 1, "dtype": "bfloat16", "enforce_eager": False},
    "trainer": {"num_gpus_per_rank": 1, "dtype": "bfloat16"},
}
"""Keys of every model on GPUs."""


def _gpu_preset(path: str) -> dict[str, Any]:
    return {"model": {"path": path}, **ON_GPU, "rollout": {**ON_GPU["rollout"], "max_model_len": 4096}}


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
        "trainer": {"num_gpus_per_rank": 0, "dtype": "float32", "activation_checkpointing": "auto"},
    },
    "qwen2.5-0.5b": _gpu_preset("Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": _gpu_preset("Qwen/Qwen2.5-1.5B-Instruct"),
}
"""Presets by name. `tiny`: a fresh Qwen2 of about 3M parameters with a character tokenizer, on a CPU. The others: hub
models, one GPU an actor."""
