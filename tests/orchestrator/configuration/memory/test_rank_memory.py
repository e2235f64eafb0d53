"""A rank's peak: against peaks that others have measured on GPUs, by hand, and how it changes with the settings.

Peaks of others are in `benchmarks/planner/published.yaml`, which says what they are of.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.memory import peaks
from penstock.conf.trainer import DeepSpeedConfig, LoraConfig, TrainerConfig
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.orchestrator.configuration.rank_memory import RankMemory, RankSetting, rank_memory
from tests.orchestrator.configuration.memory import shapes


def shape_of(name: str) -> ModelShape:
    shape = ModelShape.of(getattr(shapes, name))
    assert shape is not None
    return shape


def setting_of(name: str = "QWEN2_7B", tokens: int = 8192, row_tokens: int = 2048, **config: Any) -> RankSetting:
    options = {"num_gpus_per_rank": 1, "dtype": "bfloat16", "activation_checkpointing": True, **config}
    return RankSetting(shape_of(name), TrainerConfig(**options), tokens, row_tokens)


@pytest.mark.parametrize("peak", peaks(), ids=lambda peak: peak["row"])
def test_peaks_of_others_are_met_within_a_tenth(peak: dict[str, Any]) -> None:
    assert peak["told"] == pytest.approx(peak["measured"], rel=0.10)


def test_a_rank_holds_sixteen_bytes_a_parameter_over_its_shards() -> None:
    parameters = shape_of("QWEN2_7B").num_parameters
    for num_ranks in (1, 8):
        parts = rank_memory(setting_of(num_ranks=num_ranks)).parts
        assert parts["weights"] + parts["moments"] == pytest.approx(12 * parameters / num_ranks)
    whole = rank_memory(setting_of(num_ranks=8, shard_size=4))
    assert whole.resident == pytest.approx(12 * parameters / 4)


def test_a_frozen_tower_has_weights_alone_and_a_trained_one_all_else_too() -> None:
    shape = shape_of("QWEN25_VL_7B")
    frozen, trained = (
        rank_memory(replace(setting_of("QWEN25_VL_7B", freeze=freeze), picture_share=0.5))
        for freeze in (["vision"], [])
    )
    assert frozen.parts["weights"] == pytest.approx(4 * shape.num_parameters)
    assert frozen.parts["moments"] == pytest.approx(8 * (shape.num_parameters - shape.tower_parameters))
    assert trained.parts["moments"] == pytest.approx(8 * shape.num_parameters)
    assert trained.total > frozen.total
    assert trained.parts["activations"] > frozen.parts["activations"]


def test_a_large_picture_may_be_what_a_small_batch_needs_most_for() -> None:
    setting = replace(setting_of("QWEN25_VL_7B", tokens=1024, row_tokens=8192, dtype="float32"), is_trained=False)
    assert rank_memory(setting).moment == "scoring"
    assert rank_memory(replace(setting, picture_share=0.9)).moment == "tower"


def test_zero_holds_what_its_stage_does_not_shard() -> None:
    """1910.02054: masters and moments are sharded from stage 1 on, gradients from 2 on, what is computed with in 3."""
    parameters = shape_of("QWEN2_7B").num_parameters

    def parts(stage: int) -> RankMemory:
        zero = DeepSpeedConfig(zero_stage=stage)
        return rank_memory(setting_of(engine="deepspeed", deepspeed=zero, num_ranks=8))

    assert parts(1).parts["weights"] == pytest.approx(parameters * (4 / 8 + 2))
    assert parts(3).parts["weights"] == pytest.approx(parameters * (4 / 8 + 2 / 8))
    assert parts(1).parts["gradients"] - parts(2).parts["gradients"] == pytest.approx(parameters * 4 * 7 / 8)


def test_offloading_leaves_the_gpu_what_is_computed_with() -> None:
    there, elsewhere = rank_memory(setting_of()), rank_memory(setting_of(offload=True))
    assert elsewhere.resident == 0
    assert elsewhere.on_host == pytest.approx(16 * shape_of("QWEN2_7B").num_parameters)
    assert elsewhere.total < there.total / 4


def test_ulysses_splits_the_tokens_and_tensor_parallelism_the_layers() -> None:
    kept = {"activation_checkpointing": False, "num_ranks": 2, "tokens": 32768}
    alone, by_tokens = setting_of(**kept), setting_of(sequence_parallel_size=2, **kept)
    by_layers = setting_of(tensor_parallel_size=2, **kept)
    assert rank_memory(by_tokens).parts["activations"] == rank_memory(alone).parts["activations"] / 2
    assert rank_memory(by_tokens).parts["activations"] < rank_memory(by_layers).parts["activations"]
    assert rank_memory(by_layers).total < rank_memory(alone).total
    by_length = setting_of(sequence_parallel_size="auto", **kept)
    assert rank_memory(by_length).parts == rank_memory(by_tokens).parts


@given(
    tokens=st.integers(1, 2**17),
    more=st.integers(0, 2**15),
    num_ranks=st.sampled_from([1, 2, 8, 64]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    checkpointing=st.booleans(),
    lora=st.sampled_from([0, 16]),
    name=st.sampled_from(["QWEN2_05B", "QWEN2_7B", "QWEN3_30B_A3B"]),
)
def test_more_tokens_never_take_less_and_recomputing_never_takes_more(
    tokens: int, more: int, num_ranks: int, dtype: str, checkpointing: bool, lora: int, name: str
) -> None:
    config: dict[str, Any] = {"num_ranks": num_ranks, "dtype": dtype, "lora": LoraConfig(rank=lora)}
    few = setting_of(name, tokens, activation_checkpointing=checkpointing, **config)
    many = rank_memory(replace(few, tokens=tokens + more))
    assert rank_memory(few).total <= many.total + 1
    kept = rank_memory(setting_of(name, tokens, activation_checkpointing=False, **config))
    # One layer's input is counted as kept and as recomputed.
    input_bytes = tokens * few.shape.hidden * few.element_bytes
    assert rank_memory(few).total <= kept.total + input_bytes + 1
