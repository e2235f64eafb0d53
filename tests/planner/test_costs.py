"""The cost model against measured kernel times, numbers by hand, and what has to be so whatever the factors are."""

from dataclasses import replace

import pytest

from penstock.conf.rollout import QUANTIZED_ONLINE, Precision
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.planner.cost_model import FP8_RATE, Efficiencies, EngineCosts, RankCosts, active_parameters
from penstock.planner.hardware import KINDS
from penstock.planner.plan_inputs import known_shape

H100, FACTORS = KINDS["h100"], Efficiencies()
BATCHES = (1, 8, 32, 64, 128, 256)
KERNELS = [
    ("meta-llama/Llama-3.1-8B", 1, (6.2, 7.2, 9.6, 12.5, 17.9, 30.2)),
    ("Qwen/Qwen3-32B", 4, (8.2, 8.6, 10.9, 12.7, 15.8, 24.1)),
    ("Qwen/Qwen3-30B-A3B", 2, (3.7, 7.3, 12.9, 15.3, 18.2, 23.7)),
    ("meta-llama/Llama-3.1-70B", 8, (10.2, 10.3, 11.2, 13.7, 16.2, 23.1)),
]
"""Milliseconds of a decode step's kernels at 2,000 tokens of context on H100: aiconfigurator-core 0.12.0 with its
measurements of vLLM."""


def shape_of(name: str) -> ModelShape:
    shape = known_shape(name)
    assert shape is not None
    return shape


@pytest.mark.parametrize(("name", "parts", "milliseconds"), KERNELS)
def test_a_decode_step_takes_what_was_measured(name: str, parts: int, milliseconds: tuple[float, ...]) -> None:
    engine = EngineCosts(shape_of(name), H100, FACTORS, parts)
    found = [1e3 * engine.kernels_s(batch, 2000) / real for batch, real in zip(BATCHES, milliseconds, strict=True)]
    assert sorted(found)[1] > 0.86, "one of the six may be lower"
    assert min(found) > 0.78
    assert max(found) < 1.05


def test_a_quantised_engine_reads_less_and_computes_faster_where_it_can() -> None:
    """Two sequences read a byte for each weight of a layer, and keys and values of 1,000 tokens."""
    shape, fp8 = shape_of("meta-llama/Llama-3.1-8B"), replace(QUANTIZED_ONLINE["fp8"], cache=1)
    plain, small = EngineCosts(shape, H100, FACTORS), EngineCosts(shape, H100, FACTORS, precision=fp8)
    saved = shape.num_layers * shape.layer_parameters + 2 * 1000 * shape.cache_elements
    seconds = plain.kernels_s(2, 1000) - small.kernels_s(2, 1000)
    assert seconds == pytest.approx(saved / (H100.bandwidth * FACTORS.bandwidth))
    assert small.prefill_s(8192) == pytest.approx(plain.prefill_s(8192) / FP8_RATE)
    on_a100 = [EngineCosts(shape, KINDS["a100"], FACTORS, precision=one) for one in (Precision(), fp8)]
    assert on_a100[0].prefill_s(8192) == on_a100[1].prefill_s(8192)
    assert on_a100[0].kernels_s(2, 1000) > on_a100[1].kernels_s(2, 1000)


@pytest.mark.parametrize(("name", "billions"), [
    ("Qwen/Qwen2.5-7B-Instruct", 7.6), ("Qwen/Qwen3-0.6B", 0.6), ("Qwen/Qwen3-32B", 32.8), ("Qwen/Qwen2.5-72B", 72.7),
    ("meta-llama/Llama-3.2-1B-Instruct", 1.24), ("Qwen/Qwen2.5-VL-3B-Instruct", 3.75),
    ("Qwen/Qwen2.5-VL-7B-Instruct", 8.29), ("Qwen/Qwen3-235B-A22B-Instruct-2507", 235.1),
    ("meta-llama/Llama-3.3-70B-Instruct", 70.6), ("meta-llama/Meta-Llama-3.1-8B-Instruct", 8.03),
    ("meta-llama/Llama-3.1-405B", 405.9), ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32.8), ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8.03),
    ("Qwen/Qwen2.5-Coder-14B-Instruct", 14.8), ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30.5), ("Qwen/Qwen2-7B", 7.6),
    ("mistralai/Mistral-7B-Instruct-v0.3", 7.25), ("mistralai/Mistral-Nemo-Instruct-2407", 12.2),
    ("mistralai/Mistral-Small-24B-Instruct-2501", 23.6), ("google/gemma-2-9b-it", 9.24), ("google/gemma-2-27b", 27.2),
    ("google/gemma-2-2b-it", 2.61), ("google/gemma-3-1b-it", 1.0), ("google/gemma-3-27b-it", 27.0),
    ("google/gemma-3-4b-it", 3.88), ("google/gemma-3-12b-pt", 11.8), ("unsloth/Qwen3-8B", 8.2),
    ("qwen2.5-7b-instruct", 7.6),
])  # fmt: skip
def test_models_that_are_known_by_name_have_their_size(name: str, billions: float) -> None:
    assert shape_of(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_mixture_computes_with_few_of_its_experts() -> None:
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    assert active_parameters(shape) / 1e9 == pytest.approx(3.0, rel=0.05)  # A3B counts the embedding, too
    assert known_shape("someone/else") is None


def test_an_update_takes_what_its_products_take() -> None:
    """One row, one micro-batch, one rank: forward and backward are three passes, once more if recomputed. Adapters save
    the optimizer and pass over the activations of all linear layers: 4 of 4,096, and 3 of 4,096 + 14,336, of q and o 2
    of 4,096, of k and v 2 of 1,024."""
    shape = shape_of("meta-llama/Llama-3.1-8B")
    factors = replace(FACTORS, layer_s=0.0, update_s=0.0)
    plain = TrainerConfig(dtype="bfloat16", activation_checkpointing=False, num_gpus_per_rank=1)
    tokens, rate = 4096, H100.flops * factors.training
    products = 2 * active_parameters(shape) * tokens / rate
    scores = 2 * shape.num_layers * shape.q_width * tokens**2 / rate
    optimizer = shape.num_parameters * 28 / (H100.bandwidth * factors.bandwidth)

    def seconds(config: TrainerConfig) -> float:
        return RankCosts(shape, H100, factors, config).update_s([tokens])

    assert seconds(plain) == pytest.approx(3 * products + 3 * scores + optimizer)
    assert seconds(replace(plain, activation_checkpointing=True)) == pytest.approx(
        4 * products + 4 * scores + optimizer
    )
    widths = 4 * 4096 + 3 * (4096 + 14336) + 2 * 4096 + 2 * 1024
    adapters = 4 * 4 * tokens * 32 * widths / (H100.bandwidth * factors.bandwidth)
    lora = seconds(replace(plain, lora=LoraConfig(rank=16)))
    assert lora == pytest.approx(3 * products + 3 * scores + adapters)


@pytest.mark.parametrize(("lora", "copies"), [(0, 3), (16, 2)])
def test_what_is_offloaded_is_copied_for_each_pass_of_each_micro_batch(lora: int, copies: int) -> None:
    """Two micro-batches: weights in float32 over a bus of 50 GB/s forward and backward, gradients back; nothing is
    hidden. The optimizer of full training runs on the host."""
    shape, factors = shape_of("Qwen/Qwen3-8B"), replace(FACTORS, overlap=0.0)
    kept = TrainerConfig(
        dtype="bfloat16", activation_checkpointing=True, num_gpus_per_rank=1, max_tokens_per_microbatch=4096,
        lora=LoraConfig(rank=lora),
    )  # fmt: skip
    offloaded, rows = replace(kept, offload=True), [4096] * 2
    on_gpu, on_host = (RankCosts(shape, H100, factors, config) for config in (kept, offloaded))
    optimizer = 0.0 if lora else 28 * (1 / 25e9 - 1 / (H100.bandwidth * factors.bandwidth))
    more = shape.num_parameters * (2 * copies * 4 / 50e9 + optimizer)
    assert on_host.update_s(rows) - on_gpu.update_s(rows) == pytest.approx(more)
    assert on_host.score_s(rows) - on_gpu.score_s(rows) == pytest.approx(2 * shape.num_parameters * 4 / 50e9)


def test_experts_attain_less_than_other_products() -> None:
    """Qwen3-30B-A3B: of each of 48 layers a token takes 8 experts of three matrices of 2,048 x 768, each with a
    row of the router."""
    shape, tokens = shape_of("Qwen/Qwen3-30B-A3B"), 4096
    factors = replace(FACTORS, layer_mixture_s=0.0)
    config = TrainerConfig(dtype="bfloat16", activation_checkpointing=False, num_gpus_per_rank=1)
    experts = 2 * 48 * 8 * (3 * 2048 * 768 + 2048) * tokens / H100.flops
    like_others = replace(factors, training_mixture=factors.training)
    more = RankCosts(shape, H100, factors, config).score_s([tokens]) - RankCosts(
        shape, H100, like_others, config
    ).score_s([tokens])
    assert more == pytest.approx(experts / factors.training_mixture - experts / factors.training)


def test_splitting_costs_collectives_and_saves_products() -> None:
    shape = shape_of("Qwen/Qwen3-32B")
    config = TrainerConfig(dtype="bfloat16", num_ranks=16, num_gpus_per_rank=1, activation_checkpointing=True)
    rows = [4000] * 8
    alone = RankCosts(shape, H100, FACTORS, config).update_s(rows)
    split = RankCosts(shape, H100, FACTORS, replace(config, tensor_parallel_size=8)).update_s(rows)
    slow = replace(H100, link=H100.link / 20)
    assert split < alone
    assert RankCosts(shape, slow, FACTORS, replace(config, tensor_parallel_size=8)).update_s(rows) > split
    within = RankCosts(shape, H100, FACTORS, replace(config, shard_size=8)).update_s(rows)
    assert within < alone, "weights are gathered within a node"


def test_groups_by_length_take_less_than_one_size_for_all() -> None:
    shape = shape_of("Qwen/Qwen3-32B")
    config = TrainerConfig(dtype="bfloat16", num_ranks=8, num_gpus_per_rank=1, activation_checkpointing=True)
    by_length, fixed = (
        RankCosts(shape, H100, FACTORS, replace(config, sequence_parallel_size=size)) for size in ("auto", 8)
    )
    assert by_length.update_s([30_000, *[1000] * 200]) < fixed.update_s([30_000, *[1000] * 200])
    assert by_length.update_s([30_000]) == pytest.approx(fixed.update_s([30_000]))
