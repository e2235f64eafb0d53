"""A model starts with the weights that transformers loads, from every kind of checkpoint, read by range or not."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.conf.errors import ModelError
from penstock.workers.trainer.models import starting_weights
from penstock.workers.trainer.models.language_model import load_causal_lm, open_causal_lm, open_scalar_lm
from penstock.workers.trainer.models.starting_weights import StartingWeights
from penstock.workers.weights.checkpoint_form import HEAD

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2_tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=4),
    "llama": lambda: LlamaConfig(**SIZES),
    "llama_tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_scaled_rope": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8, "rope_theta": 1e4,
        },
    ),
    "gpt2": lambda: GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, head_dim=4, num_experts=12, moe_intermediate_size=8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors come in many chunks then."""
    monkeypatch.setattr(starting_weights, "CHUNK_BYTES", 256)


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Why checkpoints were not read by range."""
    with caplog.at_level(logging.WARNING, logger="penstock"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "penstock"]


def made(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def filled(lm: Any, weights: StartingWeights) -> dict[str, Tensor]:
    values = {name: torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
              for name, parameter in lm.named_parameters()}  # fmt: skip
    for name, target in values.items():
        assert lm.get_parameter(name).is_meta
        weights.fill(target, name)
    return values


def assert_as_loaded(path: Path, dtype: str = "float32") -> None:
    lm, weights = open_causal_lm(str(path), dtype=dtype)
    expected = load_causal_lm(str(path), dtype=dtype)
    ours, theirs = filled(lm, weights), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name], value), name
    buffers = dict(expected.named_buffers())
    assert [name for name, _ in lm.named_buffers()] == list(buffers)
    for name, buffer in lm.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name
    assert lm.config.to_dict() == expected.config.to_dict()
    assert lm.generation_config.to_dict() == expected.generation_config.to_dict()
    assert lm.training
    assert [name for name, _ in lm.named_parameters(remove_duplicate=False)] == [
        name for name, _ in expected.named_parameters(remove_duplicate=False)
    ]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_starts_as_transformers_loads_it(tmp_path: Path, kind: str, reasons: Callable[[], list[str]]) -> None:
    made(kind).save_pretrained(tmp_path)
    assert_as_loaded(tmp_path)
    assert not reasons()


@pytest.mark.parametrize(
    ("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_weights_are_cast_from_the_dtype_of_the_checkpoint(tmp_path: Path, stored: str, wanted: str) -> None:
    made("qwen2").to(getattr(torch, stored)).save_pretrained(tmp_path)
    assert_as_loaded(tmp_path, wanted)


def test_a_checkpoint_may_lie_in_many_files(tmp_path: Path, reasons: Callable[[], list[str]]) -> None:
    made("llama").save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_as_loaded(tmp_path)
    assert not reasons()


def test_a_checkpoint_may_have_no_head_of_its_own_where_that_is_tied(
    tmp_path: Path, reasons: Callable[[], list[str]]
) -> None:
    model = made("qwen2_tied")
    model.model.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    assert_as_loaded(tmp_path)
    assert not reasons()


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_tied_weights_may_be_stored_twice(tmp_path: Path, reasons: Callable[[], list[str]]) -> None:
    made("llama_tied").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"].clone()}))
    assert_as_loaded(tmp_path)
    assert not reasons()


def test_what_differs_is_not_tied(tmp_path: Path, reasons: Callable[[], list[str]]) -> None:
    made("llama_tied").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"] + 1}))
    assert_as_loaded(tmp_path)
    assert "ties model.embed_tokens.weight and lm_head.weight, which differ" in reasons()[0]


def test_files_of_another_kind_are_loaded_whole_and_a_line_says_so(
    tmp_path: Path, reasons: Callable[[], list[str]]
) -> None:
    model = made("qwen2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_as_loaded(tmp_path)
    assert "it has no safetensors. Each rank loads the whole model" in reasons()[0]


@pytest.mark.parametrize("is_bin", [False, True])
def test_weights_that_a_checkpoint_lacks_are_an_error_with_their_names(tmp_path: Path, is_bin: bool) -> None:
    model = made("qwen2")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda all: all.__delitem__("model.layers.1.mlp.up_proj.weight"))
    if is_bin:
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"^model\.path=.* it lacks 1 of 27 tensors: model\.layers\.1\.mlp\.up_proj"):
        open_causal_lm(str(tmp_path))


def test_nothing_random_happens_where_nothing_is_missing(tmp_path: Path) -> None:
    made("qwen2").save_pretrained(tmp_path)
    before = torch.get_rng_state()
    open_causal_lm(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_index_that_names_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path, max_shard_size="5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / index["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(ModelError, match=r"model\.path="):
        open_causal_lm(str(tmp_path))


def test_a_new_head_is_zero_and_one_of_the_checkpoint_is_kept(tmp_path: Path, reasons: Callable[[], list[str]]) -> None:
    made("llama").save_pretrained(tmp_path / "causal")
    ours = filled(*open_scalar_lm(str(tmp_path / "causal"), new=[HEAD]))
    assert not ours["score.weight"].any()
    assert torch.equal(
        ours["model.norm.weight"], load_file(tmp_path / "causal" / "model.safetensors")["model.norm.weight"]
    )
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(tmp_path / "scores")
    ours = filled(*open_scalar_lm(str(tmp_path / "scores"), new=[HEAD]))
    assert torch.equal(ours["score.weight"], load_file(tmp_path / "scores" / "model.safetensors")["score.weight"])
    assert ours["score.weight"].any()
    with pytest.raises(ModelError, match=r"^model\.path=.* it lacks 1 of 21 tensors: score\.weight"):
        open_scalar_lm(str(tmp_path / "causal"))
    rewrite(tmp_path / "scores", lambda all: all.__delitem__("score.weight"))
    with pytest.raises(ModelError, match="it lacks 1 of 21 tensors"):
        open_scalar_lm(str(tmp_path / "scores"), new=[HEAD])
    assert not reasons()


def test_ranges_of_rows_columns_and_elements_are_those_of_the_whole(tmp_path: Path) -> None:
    model = made("qwen2")
    model.save_pretrained(tmp_path)
    _, weights = open_causal_lm(str(tmp_path))
    name = "model.layers.0.mlp.up_proj.weight"
    whole = model.get_parameter(name).detach()
    part = torch.zeros(7, 5)
    weights.fill(part, name, 11, slice(3, 8))
    assert torch.equal(part, whole[11:18, 3:8])
    for first, count in ((0, 16), (5, 40), (379, 5), (384, 0)):
        elements = torch.zeros(count)
        weights.fill_elements(elements, name, first)
        assert torch.equal(elements, whole.reshape(-1)[first : first + count])
    empty = torch.zeros(0, 16)
    weights.fill(empty, name, 24)


def test_rows_of_stacked_experts_are_read_from_the_files_of_those_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("qwen3_moe")
    model.save_pretrained(tmp_path)
    _, weights = open_causal_lm(str(tmp_path))
    asked = []
    slices = starting_weights.StoredTensors.slices
    monkeypatch.setattr(
        starting_weights.StoredTensors, "slices", lambda self, key, *rest: asked.append(key) or slices(self, key, *rest)
    )
    name = "model.layers.1.mlp.experts.gate_up_proj"
    part = torch.zeros(2, 16, 16)
    weights.fill(part, name, 9)
    assert torch.equal(part, model.get_parameter(name)[9:11])
    elements = torch.zeros(300)
    weights.fill_elements(elements, name, 9 * 256 + 5)
    assert torch.equal(elements, model.get_parameter(name)[9:11].reshape(-1)[5:305])
    stem = "model.layers.1.mlp.experts"
    assert set(asked) == {f"{stem}.{expert}.{half}_proj.weight" for expert in (9, 10) for half in ("gate", "up")}


def test_a_big_table_is_let_go_of_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting_weights, "CHUNK_BYTES", 2**20)
    save_file({"table": torch.ones(16 * 2**10, 256)}, tmp_path / "model.safetensors")
    stored = starting_weights.StoredTensors({"table": str(tmp_path / "model.safetensors")})
    weights, target = StartingWeights({"table": stored["table"]}), torch.zeros(16 * 2**10, 256)
    mapped = []
    for start in range(0, len(target), 2**10):
        weights.fill(target[start : start + 2**10], "table", start)
        mapped.append(resident_file_bytes())
    assert target.all()
    assert max(mapped) - min(mapped) < 5 * 2**20


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))
