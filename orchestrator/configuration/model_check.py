"""Checks before anything starts that the model's directory holds what the run needs. No weights are loaded: the check
reads the directory's JSON files."""

import json
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError, ModelError
from penstock.conf.model import FreshModelConfig, ModelConfig
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.fresh_model import character_tokenizer, vocabulary_size
from penstock.workers.prompts.tokenization import load_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_model(config: RunConfig) -> str:
    """Describe the policy in a few words. Raises `ModelError` naming the missing file, or `ConfigError` for lengths
    that do not fit."""
    if config.model.reference_path is not None:
        _describe(config.model.reference_path, "model.reference_path", config.rollout.max_model_len)
    model = starting_model_config(config)
    if model.path is None:
        return _fresh(model.fresh, config.rollout.max_model_len)
    return _describe(model.path, "model.path", config.rollout.max_model_len)


def starting_model_config(config: RunConfig) -> ModelConfig:
    """The model's configuration in the run that brings the first weights: this one, or its warm start."""
    if config.model.path is not None or config.warm_start.recipe is None:
        return config.model
    return starting_model_config(load_config([f"recipe={config.warm_start.recipe}", *config.warm_start.overrides]))


def tokenizer_of(config: RunConfig) -> Any:
    """The tokenizer that prompts will be encoded with. Raises `ModelError`."""
    model = starting_model_config(config)
    return character_tokenizer(model.fresh) if model.path is None else load_tokenizer(model.path)


def _fresh(model: FreshModelConfig, max_model_len: int) -> str:
    _check_length("model.fresh.max_position_embeddings", model.max_position_embeddings, max_model_len)
    return f"a fresh Qwen2 of {num_parameters(model) / 1e6:.1f}M parameters, character tokenizer"


def num_parameters(model: FreshModelConfig) -> int:
    """Number of parameters of the Qwen2 that `build_fresh_model` makes, tied embeddings counted once."""
    hidden, key_value = model.hidden_size, model.hidden_size // model.num_heads * model.num_kv_heads
    attention = 2 * hidden * hidden + 2 * hidden * key_value + hidden + 2 * key_value  # q, k, v have biases
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    return vocabulary_size(model) * hidden + model.num_layers * layer + hidden


def _describe(path: str, key: str, max_model_len: int) -> str:
    directory = Path(path).expanduser()
    if not directory.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ModelError(f"{key}={path}: there is no such directory.")
        return f"{path} of the Hugging Face hub, fetched at the start unless it is in the cache"
    model = _read_config(directory, key)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{key}={path}: has no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            f"Save it there: tokenizer.save_pretrained({path!r})."
        )
    if not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{key}={path}: has no weights (*.safetensors). Save them there: model.save_pretrained({path!r})."
        )
    longest = model.get("max_position_embeddings")
    if isinstance(longest, int):
        _check_length(f"{key}={path}: max_position_embeddings", longest, max_model_len)
    size_mib = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20
    return f"{path}: {model.get('model_type', 'unknown type')}, {size_mib:,.0f} MiB of weights"


def _read_config(directory: Path, key: str) -> dict[str, Any]:
    file = directory / "config.json"
    if not file.is_file():
        raise ModelError(f"{key}={directory}: has no config.json, so it is no HF model directory.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}: not valid JSON ({error}).") from None
    return values if isinstance(values, dict) else {}


def _check_length(what: str, longest: int, max_model_len: int) -> None:
    if max_model_len > longest:
        raise ConfigError(
            f"rollout.max_model_len={max_model_len} is more than the model takes ({what}={longest}). "
            "Lower rollout.max_model_len."
        )
