"""A rank's peak: against peaks that others have measured on GPUs, by hand, and how it changes with the settings.

Peaks of others: prime-rl, `benchmarks/baselines` (Apache-2.0), policy updates with recomputed layers, two micro-batches
of one packed row a GPU, `torch.cuda.max_memory_reserved`; master weights float32, computed with bfloat16, FSDP2, AdamW.
Its output layer is computed in slices of 2,048 words over all tokens, which is what `logprob_chunk_mib` says here.

Left out, since Penstock's trainer is another: rows of `sft`, which keep all logits; rows of activation offload; LoRA of
Qwen3-30B-A3B, which there has adapters around every expert. torchtitan's row (Llama-3.1-8B, 82.4 GiB) recomputes chosen
operations and keeps all logits.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.trainer import DeepSpeedConfig, LoraConfig, TrainerConfig
from penstock.orchestrator.configuration.memory.model_shape import ModelShape
from penstock.orchestrator.configuration.memory.rank_memory import RankMemory, RankSetting, rank_memory
from tests.orchestrator.configuration.memory import shapes

GIB = 2**30
PEAKS = [
    # model, GPUs, LoRA rank, tokens, GiB
    ("1 H100", "QWEN3_06B", 1, 0, 16384, 12.53),
    ("1 H100", "QWEN3_06B", 1, 0, 65536, 19.56),
    ("1 H100", "QWEN3_4B", 1, 16, 16384, 23.30),
    ("1 H100", "QWEN3_4B", 1, 16, 65536, 41.99),
    ("8 H100", "QWEN3_4B", 8, 0, 16384, 17.10),
    ("8 H100", "QWEN3_4B", 8, 0, 65536, 36.10),
    ("8 H100", "QWEN3_4B", 8, 16, 16384, 10.26),
    ("8 H100", "QWEN3_4B", 8, 16, 65536, 28.85),
    ("8 H100", "QWEN3_30B_A3B", 8, 0, 16384, 74.59),
    ("8 H200", "QWEN3_4B", 8, 0, 16384, 17.10),
    ("8 H200", "QWEN3_4B", 8, 0, 65536, 36.10),
]
SLICE_BYTES = 2048 * 14
"""Bytes of one token in prime-rl's slices of logits: bfloat16, and three times float32."""


def shape_of(name: str) -> ModelShape:
    shape = ModelShape.of(getattr(shapes, name))
    assert shape is not None
    return shape


def setting_of(name: str = "QWEN2_7B", tokens: int = 8192, row_tokens: int = 2048, **config: Any) -> RankSetting:
    options = {"num_gpus_per_rank": 1, "dtype": "bfloat16", "activation_checkpointing": True, **config}
    return RankSetting(shape_of(name), TrainerConfig(**options), tokens, row_tokens)


@pytest.mark.parametrize(("machine", "name", "gpus", "lora", "tokens", "gib"), PEAKS)
def test_peaks_of_others_are_met_within_a_tenth(
    machine: str, name: str, gpus: int, lora: int, tokens: int, gib: float
) -> None:
    chunk_mib = SLICE_BYTES * tokens / 2**20
    config = {"num_ranks": gpus, "lora": LoraConfig(rank=lora), "logprob_chunk_mib": chunk_mib}
    told = rank_memory(setting_of(name, tokens, tokens, **config)).total / GIB
    assert told == pytest.approx(gib, rel=0.10)


def test_a_rank_holds_sixteen_bytes_a_parameter_over_its_shards() -> None:
    parameters = shape_of("QWEN2_7B").num_parameters
    for num_ranks in (1, 8):
        parts = rank_memory(setting_of(num_ranks=num_ranks)).parts
        assert parts["weights"] + parts["moments"] == pytest.approx(12 * parameters / num_ranks)
    whole = rank_memory(setting_of(num_ranks=8, shard_size=4))
    assert whole.resident == pytest.approx(12 * parameters / 4)


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
