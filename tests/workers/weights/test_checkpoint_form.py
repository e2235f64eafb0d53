"""What engines and people are given of a mixture of experts is what `save_pretrained` would write."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from penstock.conf.errors import ModelError
from penstock.workers.weights.checkpoint_form import CheckpointForm, stacked_experts
from penstock.workers.weights.piece import Piece
from tests.mixtures import MIXTURES, build_mixture


@pytest.mark.parametrize("kind", MIXTURES)
def test_parts_are_the_tensors_that_save_pretrained_writes(tmp_path: Path, kind: str) -> None:
    path = build_mixture(kind, tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(path)
    form, ours = CheckpointForm(lm), {}
    for name, tensor in lm.state_dict().items():
        for part in form.pieces(Piece(name, tuple(tensor.shape), 0, tensor.reshape(-1))):
            assert part.first == 0
            ours[part.name] = part.values.view(part.shape)
    stored = load_file(f"{path}/model.safetensors")
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[name], stored[name]) for name in stored)
    assert len([name for name in stored if ".experts." in name]) == 2 * 4 * 3
    assert len(stacked_experts(lm)) == 2 * 2


@pytest.mark.parametrize("kind", MIXTURES)
def test_engines_are_sent_a_stack_where_checkpoints_have_many_experts(kind: str) -> None:
    lm = MIXTURES[kind]()
    alone, stacked = CheckpointForm(lm), CheckpointForm(lm, stacked=True)
    of_experts = {"qwen3_moe": ("gate_up_proj", "down_proj"), "mixtral": ("w13", "w2")}[kind]
    for name, tensor in lm.state_dict().items():
        pieces = list(stacked.pieces(Piece(name, tuple(tensor.shape), 0, tensor.reshape(-1))))
        if name in stacked_experts(lm):
            assert pieces[0].name.rpartition("experts.")[2] in of_experts
        else:
            assert pieces[0].name == alone.parts(name, tuple(tensor.shape))[0].name
        (whole,) = pieces
        assert whole.values.view(whole.shape).equal(tensor)


def tensors_of(lm: Any, *, stacked: bool) -> list[str]:
    form = CheckpointForm(lm, stacked=stacked)
    return [part.name for name, one in lm.named_parameters() for part in form.parts(name, tuple(one.shape))]


def test_a_mixture_of_30b_is_531_tensors_to_engines_and_18867_in_its_files() -> None:
    with torch.device("meta"):
        lm = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
                num_key_value_heads=4, head_dim=128, num_experts=128, moe_intermediate_size=768,
                intermediate_size=6144,
            )
        )  # fmt: skip
    assert len(tensors_of(lm, stacked=False)) == 48 * (128 * 3 + 9) + 3 == 18867
    assert len(tensors_of(lm, stacked=True)) == 48 * (2 + 9) + 3 == 531


EXPERTS = (3, 4, 2)
"""Three experts of two neurons: gate and up have 4 elements each."""


@given(cuts=st.lists(st.integers(0, math.prod(EXPERTS)), max_size=5))
def test_pieces_of_any_cut_are_every_element_of_every_part_once(cuts: list[int]) -> None:
    form = CheckpointForm(MIXTURES["qwen3_moe"]())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = torch.arange(math.prod(EXPERTS))
    found = {part.name: torch.full(part.shape, -1).reshape(-1) for part in form.parts(name, EXPERTS)}
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(whole)], strict=True):
        pieces = list(form.pieces(Piece(name, EXPERTS, start, whole[start:end])))
        assert [piece.name for piece in pieces] == list(found)
        for piece in pieces:
            target = found[piece.name][piece.first : piece.first + len(piece.values)]
            assert (target == -1).all()
            target.copy_(piece.values)
    assert torch.cat(list(found.values())).equal(whole)
    assert list(found)[:2] == [f"model.layers.0.mlp.experts.0.{half}_proj.weight" for half in ("gate", "up")]


def test_a_tensor_that_transformers_makes_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = WeightConverter("mlp.experts.down_proj", "mlp.experts.down_proj", [Transpose(1, 2)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [turned])
    form = CheckpointForm(MIXTURES["qwen3_moe"]())
    with pytest.raises(ModelError, match=r"makes .*down_proj of .* by \[Transpose.*model\.path"):
        form.parts("model.layers.0.mlp.experts.down_proj", (4, 32, 16))
    assert form.parts("model.norm.weight", (32,))[0].name == "model.norm.weight"


def test_a_part_has_the_prefix_that_transformers_takes_off_it() -> None:
    """As in checkpoints of LLaVA, and in vLLM. transformers reads them with it and without."""
    from tests.workers.trainer.seeing import model_that_sees

    lm = model_that_sees("llava")
    weight = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
    (part,) = CheckpointForm(lm).parts(weight, tuple(lm.get_parameter(weight).shape))
    assert part.name == "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"
