"""Sizes of models that are made and counted, against transformers' own and against those by formulas."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.measured_shape import measured_shape
from penstock.orchestrator.configuration.memory_view import MemoryView
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.orchestrator.configuration.rank_memory import RankSetting, layer_saved
from penstock.orchestrator.configuration.resolved import resolve
from penstock.planner.cost_model import active_parameters

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 200,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 24, "q_lora_rank": 16,
          "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "phi3": {},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4} | EXPERTS,
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 48} | EXPERTS,
    "deepseek_v3": {"num_key_value_heads": 4} | LATENT | EXPERTS,
}


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_those_that_transformers_makes(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {"model_type": kind} | SIZES | MODELS[kind]
    assert ModelShape.of(values) is None
    shape = measured_shape(values)
    assert shape is not None
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    lm.tie_weights()
    in_all = sum(parameter.numel() for parameter in lm.parameters())
    assert shape.num_parameters == pytest.approx(in_all, abs=shape.num_layers)  # layers differ, and one stands for all
    assert shape.num_layers == 3
    assert shape.root_parameters + shape.num_layers * shape.layer_parameters == shape.num_parameters
    assert shape.measured is not None
    assert shape.measured.kept_bfloat16 > 0


@pytest.mark.parametrize(("dtype", "within"), [("bfloat16", 0.1), ("float32", 0.1)])
def test_a_model_whose_formulas_are_known_is_measured_the_same(dtype: str, within: float) -> None:
    values = {"model_type": "qwen2", "tie_word_embeddings": True} | SIZES
    known, measured = ModelShape.of(values), measured_shape(values)
    assert known is not None
    assert measured is not None
    assert measured.num_parameters == known.num_parameters
    assert measured.root_parameters == known.root_parameters
    assert (measured.is_tied, measured.longest, measured.cache_elements) == (True, 512, known.cache_elements)
    for targets in (None, ("q_proj", "v_proj")):
        assert measured.adapter_parameters(4, targets) == known.adapter_parameters(4, targets)
    config = TrainerConfig(dtype=dtype)
    formula, found = (layer_saved(RankSetting(shape, config, 512, 512)) for shape in (known, measured))
    assert found == pytest.approx(formula, rel=within)


def test_latent_attention_caches_one_vector_a_layer() -> None:
    shape = measured_shape({"model_type": "deepseek_v3"} | SIZES | MODELS["deepseek_v3"])
    assert shape is not None
    assert shape.cache_elements == 3 * (24 + 8)


LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 16,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "routed", "growing"),
    [
        ("qwen2_moe", {}, 3 * 4 * 3 * 64 * 32, 3),
        ("deepseek_v3", {}, 2 * 4 * 3 * 64 * 32, 3),  # the first layer is dense
        ("gpt_oss", {"sliding_window": 128}, 3 * 4 * (3 * 64 * 96 + 2 * 96 + 64), 1),
        ("gpt_oss", {"sliding_window": 4096}, 3 * 4 * (3 * 64 * 96 + 2 * 96 + 64), 3),
        ("qwen3_next", LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 48} | EXPERTS,
         3 * 4 * 3 * 64 * 32, 1),
        ("qwen3_5_text", LINEAR, 0, 1),
    ],
)  # fmt: skip
def test_a_token_passes_by_experts_and_layers_without_a_cache(
    kind: str, sizes: dict[str, Any], routed: int, growing: int
) -> None:
    shape = measured_shape({"model_type": kind} | SIZES | MODELS.get(kind, {}) | sizes)
    assert shape is not None
    assert shape.num_layers * shape.routed_parameters == pytest.approx(routed)
    assert (shape.num_experts, shape.experts_per_token) == ((4, 2) if routed else (0, 1))
    in_layers = shape.num_layers * (shape.attention_parameters + shape.mlp_parameters)
    assert active_parameters(shape) == pytest.approx(in_layers - routed / 2 + shape.head_parameters)
    assert shape.cache_elements == 2 * growing * shape.kv_width


@pytest.mark.parametrize("values", [{"model_type": "of somebody"}, {"model_type": "mamba"}, {}, {"model_type": "clip"}])
def test_what_is_no_decoder_with_heads_has_no_sizes(values: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert measured_shape(values | {"num_hidden_layers": 2}) is None
    assert "memory is not known" in caplog.text


def test_validate_has_the_tables_of_a_model_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2"} | SIZES))
    run = resolve(
        load_config(
            ["recipe=gsm8k", f"model.path={tmp_path}", "cluster.gpu_memory_gib=79", "rollout.max_model_len=512",
             "rollout.sampling.max_tokens=256"]
        )
    )  # fmt: skip
    view = MemoryView.of(run)
    assert view.memory is not None
    assert "unknown" not in view.summary()
    assert view.devices() is not None
