"""Sizes of a model from its config.json, against transformers' own."""

import json
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from penstock.orchestrator.configuration.model_shape import TOWERS, ModelShape, TowerShape
from penstock.workers.pictures.processor import FAMILIES
from tests.orchestrator.configuration.memory import shapes
from tests.workers.trainer import seeing

TINY = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10,
}  # fmt: skip


@pytest.mark.parametrize("name", ["QWEN2_05B", "QWEN2_7B", "LLAMA_8B", "QWEN3_4B", "QWEN3_30B_A3B", "MIXTRAL"])
def test_parameters_are_as_many_as_transformers_makes(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = getattr(shapes, name)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    lm.tie_weights()
    shape = ModelShape.of(values)
    assert shape is not None
    assert shape.num_parameters == sum(parameter.numel() for parameter in lm.parameters())


def tiny_vision_model(kind: str) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, tie_word_embeddings=True, **deepcopy(seeing.CONFIGS[kind]))
    return json.loads(config.to_json_string(use_diff=False))  # as it is saved: the text's sizes in a part of their own


SEEING = {
    "QWEN25_VL_7B": lambda: shapes.QWEN25_VL_7B,
    "QWEN2_VL_7B": lambda: shapes.QWEN2_VL_7B,
    **{kind: partial(tiny_vision_model, kind) for kind in FAMILIES},
}


def test_every_family_of_vision_models_has_the_sizes_of_its_tower() -> None:
    assert {*TOWERS} == {*FAMILIES}


@pytest.mark.parametrize("name", SEEING)
def test_parameters_of_a_model_that_sees_are_as_many_as_transformers_makes(name: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = SEEING[name]()
    with torch.device("meta"):
        lm = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**values))
    lm.tie_weights()
    shape = ModelShape.of(values)
    assert shape is not None
    modules = [getattr(lm.model, name) for name in FAMILIES[values["model_type"]].tower]
    assert shape.tower_parameters == sum(one.numel() for module in modules for one in module.parameters())
    assert shape.num_parameters == sum(parameter.numel() for parameter in lm.parameters())
    if name == "QWEN25_VL_7B":
        assert shape.num_parameters == 8_292_166_656  # as its files on the hub have


def test_parameters_of_a_tower_by_hand() -> None:
    """A tower of width 4 whose MLP is 6 wide, of patches of 12 numbers, two by two of which make a feature of 8."""
    values = {"depth": 3, "hidden_size": 4, "intermediate_size": 6, "in_channels": 3, "patch_size": 2,
              "temporal_patch_size": 1, "spatial_merge_size": 2, "out_hidden_size": 8}  # fmt: skip
    tower = TowerShape.of("qwen2_5_vl", values)
    assert tower is not None
    assert tower.block_parameters == (4 * 16 + 4 * 4) + (3 * 24 + 2 * 6 + 4) + 2 * 4
    assert tower.root_parameters == 12 * 4 + 4 + (16 * 16 + 16) + (16 * 8 + 8)
    assert tower.num_parameters == 3 * 176 + 460


def test_parameters_of_a_layer_by_hand() -> None:
    shape = ModelShape.of(TINY)
    assert shape is not None
    assert shape.attention_parameters == 2 * 8 * 8 + 2 * 8 * 4  # q and o, k and v
    assert shape.mlp_parameters == 3 * 8 * 16
    assert shape.num_parameters == 2 * (192 + 384 + 16) + 2 * 10 * 8 + 8
    assert shape.adapter_parameters(2) == 2 * 2 * (2 * 16 + 2 * 12 + 3 * 24)
    assert shape.adapter_parameters(2, ("q_proj", "v_proj")) == 2 * 2 * (16 + 12)


def test_adapters_of_experts_are_counted_where_they_are_named() -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    shape = ModelShape.of(TINY | experts)
    assert shape is not None
    attention = 2 * 16 + 2 * 12
    assert shape.adapter_parameters(2) == shape.adapter_parameters(2, ["all-linear"]) == 2 * 2 * attention
    named = ["all-linear", "gate_up_proj", "experts.down_proj"]
    assert shape.adapter_parameters(2, named) == 2 * 2 * (attention + 5 * (8 + 12) + 5 * (6 + 8))
    assert shape.adapted_experts(named) == 5 * (8 * 12 + 6 * 8)
    assert shape.adapted_experts(["all-linear"]) == 0
    assert shape.record_bytes == 2 * 2


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "deepseek_v3"},
        {"intermediate_size": None},
        {"mlp_only_layers": [0]},
        {"hidden_size": None},
        {"model_type": "qwen2_5_vl"},
        {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}},
    ],
)
def test_a_kind_of_model_that_is_not_known_has_no_sizes(changed: dict[str, Any]) -> None:
    values = {key: value for key, value in (TINY | changed).items() if value is not None}
    assert ModelShape.of(values) is None
