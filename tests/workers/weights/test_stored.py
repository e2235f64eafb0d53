"""Checkpoints that are not of their model are told from those that are, before any weights are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3MoeConfig,
)

from penstock.conf.errors import ModelError
from penstock.workers.weights.checkpoint_form import check_model

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
UP = "model.layers.1.mlp.up_proj.weight"


def llama(**more: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        check_model(str(path), "model.reference_path", **options)
    assert str(caught.value).startswith(f"model.reference_path={path}: ")
    return str(caught.value)


@pytest.mark.parametrize("shard", ["5KB", "5GB"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_checkpoint_passes(tmp_path: Path, shard: str, tied: bool) -> None:
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size=shard)
    assert check_model(str(tmp_path)).device.type == "meta"


def test_a_checkpoint_of_torch_is_looked_at_as_one_of_safetensors(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    tensors = model.state_dict()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    check_model(str(tmp_path))
    del tensors[UP]
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert f"it lacks 1 of 21 tensors: {UP}. Save the whole model there" in refused(tmp_path)


def test_tensors_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    rewrite(
        tmp_path, lambda all: (all.pop(UP), all.update({"model.norm.weight": torch.ones(15), "extra": torch.ones(1)}))
    )
    assert (
        "its weights are not those of LlamaForCausalLM, which its config.json describes: it lacks 1 of 21 tensors: "
        f"{UP}; model.norm.weight is [15] instead of [16]. It has others: extra. Save the whole model there: "
        "model.save_pretrained("
    ) in refused(tmp_path)


def test_a_head_that_is_not_tied_and_not_there_is_missing(tmp_path: Path) -> None:
    llama().model.save_pretrained(tmp_path)
    assert "it lacks 1 of 21 tensors: lm_head.weight" in refused(tmp_path)


def test_names_of_peft_are_told_with_the_call_that_merges(tmp_path: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    model.get_base_model().config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = refused(tmp_path)
    assert "it lacks 21 of 21 tensors" in message
    assert "It has names of PEFT's (base_model.model." in message
    assert "model.merge_and_unload().save_pretrained(DIRECTORY)" in message
    save_file({name.removeprefix("base_model.model."): tensor for name, tensor in model.state_dict().items()},
              tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    message = refused(tmp_path)
    assert "it lacks 2 of 21 tensors: model.layers.0.self_attn.q_proj.weight" in message
    assert "merge_and_unload" in message


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    model.get_base_model().config.save_pretrained(tmp_path)
    assert "it is an adapter of PEFT. Merge it into its model" in refused(tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    check_model(str(tmp_path / "merged"))


def test_experts_are_counted(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, head_dim=4, num_experts=4, moe_intermediate_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_model(str(tmp_path))
    rewrite(
        tmp_path, lambda all: [all.pop(f"model.layers.0.mlp.experts.3.{part}_proj.weight") for part in ("up", "gate")]
    )
    assert "experts.gate_up_proj is [3, 16, 16] instead of [4, 16, 16]" in refused(tmp_path)


def test_a_reward_model_has_its_head(tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(tmp_path / "scores")
    check_model(str(tmp_path / "scores"), scores=True)
    llama().save_pretrained(tmp_path / "causal")
    assert "it lacks 1 of 21 tensors: score.weight" in refused(tmp_path / "causal", scores=True)
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=2)).save_pretrained(tmp_path / "two")
    assert "score.weight is [2, 16] instead of [1, 16]" in refused(tmp_path / "two", scores=True)


@pytest.mark.parametrize("kind", ["nothing", "cut", "index", "unknown"])
def test_files_that_cannot_be_read_are_an_error_of_the_model(tmp_path: Path, kind: str) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="5KB" if kind == "index" else "5GB")
    whole = tmp_path / "model.safetensors"
    if kind == "nothing":
        whole.unlink()
        assert "has no weights (model.safetensors or pytorch_model.bin" in refused(tmp_path)
    elif kind == "cut":
        whole.write_bytes(whole.read_bytes()[:-100])
        assert "its weights cannot be read" in refused(tmp_path)
    elif kind == "index":
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        (tmp_path / index["weight_map"]["model.norm.weight"]).unlink()
        assert "its weights cannot be read" in refused(tmp_path)
    else:
        (tmp_path / "config.json").write_text('{"model_type": "mine"}')
        assert "transformers makes no model of its configuration" in refused(tmp_path)
