"""Layers that are computed in chunks of tokens have the results and gradients of whole ones, in less memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.algorithms.losses import policy_loss, ppo_clip_loss, value_loss
from penstock.conf.errors import ConfigError
from penstock.conf.trainer import DeepSpeedConfig, LoraConfig, OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.engines.lora import add_adapters
from penstock.workers.trainer.models import packed_attention, streamed_layers
from penstock.workers.trainer.models.language_model import PolicyModel, stream_layers
from penstock.workers.trainer.models.streamed_layers import segments_of
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.scalar import CriticTrainer
from penstock.workers.trainer.update.token_layout import Blocks
from tests.orchestrator.configuration.memory.test_step_memory import TotalTracker
from tests.workers.trainer.conftest import copy_of_weights
from tests.workers.trainer.models.test_own_logits import HEADS, tiny
from tests.workers.trainer.models.test_packed_attention import MODELS, make
from tests.workers.trainer.test_packing import LINEAR, assert_near, rows_of
from tests.workers.trainer.test_sharing import FULL, IN_FLOAT32, exactly

Make = Callable[..., PolicyTrainer]
STREAM: dict[str, Any] = {"activation_checkpointing": "stream"}
LENGTHS = [19, 9, 3, 2, 2, 1, 1]
LAYOUTS: dict[str, tuple[tuple[int, int], list[int] | None]] = {
    # rows and tokens, blocks
    "a long row": ((1, 20), None),
    "long rows": ((2, 20), None),
    "short rows": ((5, 3), None),
    "packed": ((1, sum(LENGTHS)), LENGTHS),
}
OF_ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("fsdp", {}),
    ("fsdp", {"packing": "always"}),
    ("fsdp", {"lora": LoraConfig(rank=4)}),
    ("fsdp", {"lora": LoraConfig(rank=4, target_modules=["q_proj"]), "packing": "always"}),
    ("fsdp", {"activation_offload": True}),
    ("fsdp", {"dtype": "bfloat16"}),
    ("zero2", {}),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_layers, "CPU_CHUNK_TOKENS", 7)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "fsdp")


def scores_and_gradients(model: PolicyModel, layout: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and entropies of all tokens but the first, and gradients of what they are weighed by."""
    shape, lengths = LAYOUTS[layout]
    ids_BL = torch.randint(3, 39, shape, generator=torch.Generator().manual_seed(2))
    targets_N = ids_BL.flatten()[1:]
    blocks = None if lengths is None else Blocks.of(lengths)
    logprobs_N, entropy_N = model(ids_BL, torch.arange(len(targets_N)), targets_N, "gradient", None, blocks)
    assert entropy_N is not None
    weight_N = torch.linspace(-1, 1, len(targets_N), dtype=torch.float64)
    (logprobs_N * weight_N + 0.3 * entropy_N).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return torch.cat([logprobs_N, entropy_N]).detach(), gradients


def assert_equal(plain: PolicyModel, streamed: PolicyModel, layout: str, tolerance: float) -> None:
    packed_attention.choose(plain.lm, "always")
    stream_layers(streamed)
    scores, gradients = zip(*(scores_and_gradients(one, layout) for one in (plain, streamed)), strict=True)
    torch.testing.assert_close(scores[1], scores[0], atol=tolerance, rtol=0)
    assert gradients[1].keys() == gradients[0].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FULL)
def test_models_have_the_gradients_of_whole_layers(kind: str, layout: str) -> None:
    """To 1e-9 in float64."""
    assert_equal(exactly(kind), exactly(kind), layout, 1e-5 if kind in IN_FLOAT32 else 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj"], ["down_proj"]])
def test_adapters_have_the_gradients_of_whole_layers(targets: list[str], layout: str) -> None:
    """To 1e-9 in float64, also where the first layer has no gradient of its keys."""
    models = [exactly("Qwen3"), exactly("Qwen3")]
    for model in models:
        values = add_adapters(model.lm, LoraConfig(rank=2, target_modules=targets))
        random = torch.Generator().manual_seed(3)
        for name, value in values.items():
            weight = torch.nn.Parameter(torch.rand(value.shape, generator=random, dtype=torch.float64) - 0.5)
            owner, _, attribute = name.rpartition(".")
            setattr(model.lm.get_submodule(owner), attribute, weight)
    assert_equal(*models, layout, 1e-9)


@pytest.mark.parametrize("kind", sorted(packed_attention.SHARING - packed_attention.ATTENDS_TWICE))
def test_every_kind_that_is_not_refused_has_the_gradients(kind: str) -> None:
    models = []
    for _ in range(2):
        lm = tiny(kind, **(HEADS[0] if kind.startswith(("hunyuan", "ministral3", "glm4_moe")) else {}))
        lm.set_attn_implementation("sdpa")
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.mul_(0.3 if parameter.ndim > 1 else 1.0)
        models.append(PolicyModel(lm))
    assert_equal(*models, "long rows", 2e-3)


@pytest.mark.parametrize(("engine", "options"), OF_ENGINES, indirect=["engine"])
def test_every_engine_has_the_updates_of_recomputed_layers(
    make_trainer: Make, make_rows: Callable[..., Rows], options: dict[str, Any]
) -> None:
    """In several micro-batches and optimizer steps, with the log-probabilities of before the update."""
    rows, weights, logprobs = rows_of(make_rows), [], []
    for way in (True, "stream"):
        ways = LINEAR | {"lr": 1e-2, "max_tokens_per_microbatch": 60, "num_minibatches": 2} | options
        trainer = make_trainer(activation_checkpointing=way, **ways)
        trainer.check_scores()
        trainer.update(rows, policy_loss)
        weights.append(copy_of_weights(trainer))
        logprobs.append(np.concatenate(trainer.logprobs(rows)))
    tolerance = 2e-3 if "dtype" in options else 2e-6
    assert weights[1].keys() == weights[0].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=tolerance, rtol=0, msg=name)
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=10 * tolerance)


def test_a_critic_has_the_update_of_recomputed_layers(model_path: str, make_rows: Callable[..., Rows]) -> None:
    weights = []
    for way in (True, "stream"):
        trainer = CriticTrainer(
            TrainerConfig(activation_checkpointing=way, optimizer=OptimizerConfig(**LINEAR)), model_path
        )
        rows = make_rows(8)
        values = trainer.values(rows)
        rows = rows.with_column("returns", [value + 1 for value in values]).with_column("old_values", values)
        trainer.update(rows, value_loss)
        weights.append(copy_of_weights(trainer))
        trainer.close()
    assert_near(weights[1], weights[0])


def test_rows_are_not_shared_and_scorers_have_whole_layers(make_trainer: Make) -> None:
    assert make_trainer(**STREAM).sharing == "never"
    scorer = make_trainer(trainable=False, **STREAM)
    assert not any("Streamed" in type(module).__name__ for module in scorer.model.modules())


def test_memory_beyond_inputs_is_a_fraction_of_recomputation_s(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row of 16 chunks, at most 0.4; weights and their gradients are not counted."""
    monkeypatch.setattr(streamed_layers, "CPU_CHUNK_TOKENS", 128)
    peaks = []
    for streams in (False, True):
        lm = make("Qwen3", {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 128}).train()
        model = PolicyModel(lm)
        if streams:
            stream_layers(model)
        else:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        embedded = torch.randn(1, 2048, 32, dtype=torch.float64, requires_grad=True)
        tracker = TotalTracker()
        ways = packed_attention.keywords(lm, None)
        with tracker:
            lm.base_model(inputs_embeds=embedded, use_cache=False, **ways).last_hidden_state.sum().backward()
        inputs = 3 * embedded.nbytes
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - inputs)
    assert peaks[1] <= 0.4 * peaks[0]


@pytest.mark.parametrize(
    ("shape", "lengths", "parts"),
    [
        ((1, 7), None, [(0, 7)]),
        ((1, 8), None, [(0, 4), (4, 8)]),
        ((3, 8), None, [(0, 4), (4, 8)] * 3),
        ((5, 3), None, [(0, 3)] * 3),
        ((1, 15), [15], [(0, 5), (5, 10), (10, 15)]),
        ((1, 16), [9, 4, 2, 1], [(0, 4), (4, 9), (9, 16)]),
        ((1, 9), [5, 4], [(0, 5), (5, 9)]),
    ],
)
def test_rows_are_cut_where_they_end_or_into_equal_parts(
    shape: tuple[int, int], lengths: list[int] | None, parts: list[tuple[int, int]]
) -> None:
    segments = list(segments_of(shape, None if lengths is None else Blocks.of(lengths), 7))
    assert [(part.start, part.stop) for segment in segments for part in segment.parts] == parts
    assert [segment.rows.start for segment in segments] == sorted(segment.rows.start for segment in segments)
    held = [segment.blocks.lengths for segment in segments if segment.blocks is not None]
    assert held == ([(4, 2, 1)] if lengths == [9, 4, 2, 1] else [])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"engine": "deepspeed", "deepspeed": DeepSpeedConfig(zero_stage=3)}, r"deepspeed\.zero_stage=3"),
        ({"compile": True}, "compile=true"),
        ({"num_ranks": 2, "tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"num_ranks": 2, "sequence_parallel_size": 2}, "sequence_parallel_size=2"),
        ({"share_prefixes": "always"}, "share_prefixes=always"),
        ({"router_aux_loss_coef": 0.1}, r"router_aux_loss_coef=0\.1"),
    ],
)
def test_what_wants_whole_layers_is_refused_by_name(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"activation_checkpointing=stream: .* trainer\.{key} wants .*=true"):
        TrainerConfig(**STREAM, **options)


@pytest.mark.parametrize(("kind", "why"), [("Qwen2", "has layers of sliding_attention"), ("Mistral", "none of")])
def test_models_that_were_not_compared_are_refused_by_name(kind: str, why: str) -> None:
    model = PolicyModel(make(kind, MODELS[kind]))
    with pytest.raises(ConfigError, match=rf"activation_checkpointing=stream: .*{why}.* Set .*=true"):
        stream_layers(model)


def test_other_attention_and_replayed_experts_are_refused_by_name(make_trainer: Make) -> None:
    lm = tiny("diffllama")
    lm.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="activation_checkpointing=stream: diffllama attends twice"):
        packed_attention.prepare_parts(lm)
    with pytest.raises(ConfigError, match=r"activation_checkpointing=stream: it is for model\.attention=sdpa"):
        make_trainer(attention="eager", **STREAM)
    with pytest.raises(ConfigError, match=r"activation_checkpointing=stream: .* rollout\.router_replay"):
        make_trainer(**STREAM).replay_experts()


def test_an_update_is_the_same_bit_for_bit_when_it_is_repeated(
    make_trainer: Make, make_rows: Callable[..., Rows]
) -> None:
    weights = []
    for _ in range(2):
        trainer = make_trainer(**STREAM, **LINEAR)
        trainer.update(make_rows(8), ppo_clip_loss)
        weights.append(copy_of_weights(trainer))
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
