"""What a model keeps in float32 reaches engines in bfloat16, exports and streams as it is: a router's bias that is
rounded would choose other experts from the first publication on."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
)

from penstock.conf.rollout import RolloutConfig
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.engine_hf import HfEngine
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.weights.checkpoint_form import keeps_float32
from penstock.workers.weights.weight_senders import SendingRank, WeightStream

Make = Callable[..., PolicyTrainer]
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
GATE = "model.layers.1.mlp.gate"
MODELS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "glm4_moe": (
        lambda: Glm4MoeForCausalLM(
            Glm4MoeConfig(**SIZES, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1)
        ),
        {f"{GATE}.e_score_correction_bias"},
    ),
    "ernie4_5_moe": (
        lambda: Ernie4_5_MoeForCausalLM(
            Ernie4_5_MoeConfig(**SIZES, moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1)
        ),
        {f"{GATE}.weight", "model.layers.1.mlp.moe_statics.e_score_correction_bias"},
    ),
}
"""One whose bias is a buffer, and one that keeps parameters; what stays in float32 of each."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, model_path: str, tmp_path: Path) -> tuple[str, set[str]]:
    """The directory of such a model, and the names."""
    make, kept = MODELS[request.param]
    torch.manual_seed(0)
    lm = make()
    with torch.no_grad():
        for name, tensor in lm.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand(tensor.shape))
    lm.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model"), kept


def kept_of(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16}


def test_publications_streams_and_exports_have_them_in_float32_and_nothing_else(
    make_trainer: Make, model: tuple[str, set[str]], tmp_path: Path
) -> None:
    path, kept = model
    trainer = make_trainer(path, engine_dtype="bfloat16")
    expected = load_file(Path(path) / "model.safetensors")
    side = SendingRank.of(trainer)
    streamed = dict(WeightStream(side))
    published = load_file(Path(trainer.publish(str(tmp_path), 1).directory) / "model.safetensors")
    trainer.export(str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for tensors in (streamed, published, exported):
        assert kept_of(tensors) == kept
        for name in kept:
            assert torch.equal(tensors[name], expected[name]), name


def test_an_hf_engine_answers_as_before_once_it_loads_the_same_weights(
    make_trainer: Make, model: tuple[str, set[str]], tmp_path: Path
) -> None:
    path, kept = model
    engine = HfEngine(EngineSpec(RolloutConfig(engine="hf", dtype="bfloat16", max_model_len=64), path))

    async def logits() -> tuple[torch.Tensor, torch.Tensor]:
        await engine.start()
        before = engine.model(ids).logits
        await engine.load(make_trainer(path, engine_dtype="bfloat16").publish(str(tmp_path), 1))
        after = engine.model(ids).logits
        await engine.close()
        return before, after

    ids = torch.randint(3, 90, (4, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, after = asyncio.run(logits())
    assert torch.equal(after, before)
    assert len(kept_of(engine.model.state_dict())) == len(kept)


def test_an_export_is_loaded_as_the_model_that_it_began_as(
    make_trainer: Make, model: tuple[str, set[str]], tmp_path: Path
) -> None:
    path, _ = model
    make_trainer(path, engine_dtype="bfloat16").export(str(tmp_path / "exported"))
    ours, expected = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).state_dict()
        for place in (tmp_path / "exported", path)
    )
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def test_a_model_without_such_weights_keeps_none() -> None:
    assert not keeps_float32(object())("model.layers.0.mlp.gate.weight")
