"""The longest sequence of a model is the one that vLLM derives, for every kind of rope scaling and both forms of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.models.model_files import longest_context, longest_short_context

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "torch_dtype": "float32",
}  # fmt: skip
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 256}
SCALED: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({}, 1024),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
    "linear, transformers 5": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 4096,
    ),
    "yarn of the length itself": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 1024,
    ),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
        1024,
    ),
    "longrope": ({"rope_scaling": {"type": "longrope", **LONG}}, 1024),
    "su": ({"rope_scaling": {"type": "su", **LONG}}, 1024),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, 1024),
    "another length": ({"max_sequence_length": 512}, 512),
    "a length that overrides": ({"model_max_length": 2048}, 2048),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "longest"), SCALED.values(), ids=list(SCALED))
def test_the_length_of_every_rope_scaling(changes: dict[str, Any], longest: int) -> None:
    assert longest_context(LLAMA | changes) == longest
    assert longest_context({"text_config": LLAMA | changes, "model_type": "sees"}) == longest


@pytest.mark.real
def test_vllm_takes_sequences_of_that_length_and_none_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from vllm.config import ModelConfig

    for changes, longest in SCALED.values():
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        made = ModelConfig(model=str(tmp_path), max_model_len=longest, skip_tokenizer_init=True)
        assert made.max_model_len == longest
        with pytest.raises(ValueError, match=rf"max_model_len \({longest + 1}\) is greater"):
            ModelConfig(model=str(tmp_path), max_model_len=longest + 1, skip_tokenizer_init=True)


def test_dynamic_scaling_ends_where_the_table_of_angles_of_vllm_does() -> None:
    assert longest_context(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}) == 1024


def test_layers_of_several_kinds_have_scalings_of_their_own() -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert longest_context(LLAMA | {"rope_parameters": ropes}) == 8192
    assert longest_context(LLAMA | {"rope_parameters": ropes, "model_type": "gemma3_text"}) == 1024


@given(st.integers(1, 2**20), st.floats(1.0, 64.0), st.sampled_from(["rope_scaling", "rope_parameters"]))
def test_a_linear_factor_stretches_and_no_scaling_ever_shortens(length: int, factor: float, name: str) -> None:
    config = {"max_position_embeddings": length, name: {"rope_type": "linear", "factor": factor}}
    assert longest_context(config) == int(length * factor) >= length


def test_a_configuration_without_a_length_has_none() -> None:
    assert longest_context({"model_type": "mamba"}) is None
    assert longest_context({"n_positions": 32}) == 32


def test_longrope_tells_where_its_long_factors_begin() -> None:
    assert longest_short_context(LLAMA | {"rope_scaling": {"type": "longrope", **LONG}}) == 256
    phi3 = {"original_max_position_embeddings": 512, "rope_scaling": {"type": "su", "long_factor": [1.0]}}
    assert longest_short_context(LLAMA | phi3) == 512
    assert longest_short_context(LLAMA | SCALED["yarn"][0]) is None
