"""Adapters of a mixture's experts on one rank. On more of them: `test_ranks_parallel.py`."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ConfigError
from penstock.conf.trainer import LoraConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.engines.lora import adapters, hf_name, is_adapter
from penstock.workers.trainer.engines.tensor_parallel import split_plan
from penstock.workers.trainer.models.language_model import load_causal_lm
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.weights.publication.adapter import find_targets
from tests.mixtures import build_mixture
from tests.model_files import logprobs_by

Make = Callable[..., PolicyTrainer]
MakeRows = Callable[..., Rows]
EXPERTS = LoraConfig(rank=4, alpha=12, target_modules=["q_proj", "experts.gate_up_proj", "experts.down_proj"])
KINDS = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: build_mixture(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def trained(make_trainer: Make, make_rows: MakeRows, path: str, **options: Any) -> PolicyTrainer:
    trainer = make_trainer(**{"path": path, "lora": EXPERTS, "lr": 1e-2} | options)
    for seed in range(3):
        trainer.update(make_rows(6, seed=seed), sft_loss)
    return trainer


def by_hand(trainer: PolicyTrainer, path: str) -> dict[str, Tensor]:
    """Names and values of the checkpoint's weights that adapters change, in float64: W + scale * B A of each expert."""
    lm = load_causal_lm(path)
    parameters = dict(trainer.model.lm.named_parameters())
    base = {name: parameter.double() for name, parameter in lm.named_parameters()}
    changed = {}
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            inner = f"model.layers.{layer}.mlp.experts." + ("base_layer." if name == "gate_up_proj" else "")
            a, b = (parameters[f"{inner}lora_{letter}.default.weight"].full_tensor().double() for letter in "AB")
            whole = base[f"model.layers.{layer}.mlp.experts.{name}"].clone()
            for expert in range(4):
                # PEFT has A's rows expert by expert, and B's columns rank by rank.
                whole[expert] += 12 / 4 * b[:, expert::4] @ a[4 * expert : 4 * expert + 4]
            changed[f"model.layers.{layer}.mlp.experts.{name}"] = whole
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_of_each_expert_is_worked_out_by_hand(
    make_trainer: Make, make_rows: MakeRows, weights_of: Callable[..., Any], paths: dict[str, str], kind: str
) -> None:
    trainer = trained(make_trainer, make_rows, paths[kind])
    published, origin = weights_of(trainer), load_file(Path(paths[kind]) / "model.safetensors")
    assert published.keys() == origin.keys()
    names = {
        "qwen3_moe": ("model.layers.{}.mlp.experts.{}.{}.weight", "gate_proj", "up_proj", "down_proj"),
        "mixtral": ("model.layers.{}.block_sparse_moe.experts.{}.{}.weight", "w1", "w3", "w2"),
    }[kind]
    changed = by_hand(trainer, paths[kind])
    for layer in range(2):
        gates_up = changed[f"model.layers.{layer}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
        whole = [*gates_up, changed[f"model.layers.{layer}.mlp.experts.down_proj"]]
        for part, values in zip(names[1:], whole, strict=True):
            for expert in range(4):
                name = names[0].format(layer, expert, part)
                torch.testing.assert_close(published.pop(name).double(), values[expert], atol=1e-6, rtol=0, msg=name)
                assert (values[expert] - origin[name]).abs().max() > 1e-4
    for name, values in published.items():
        assert values.equal(origin[name]) == ("q_proj" not in name), name


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"packing": "always"}])
def test_an_export_has_the_logits_of_what_was_trained_and_peft_merges_the_same(
    make_trainer: Make, make_rows: MakeRows, paths: dict[str, str], tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer, rows = trained(make_trainer, make_rows, paths["qwen3_moe"], **changes), make_rows(1)
    trainer.export(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(
        torch.from_numpy(trainer.logprobs(rows)[0]), logprobs_by(loaded, rows), atol=2e-5, rtol=0
    )
    plain = AutoModelForCausalLM.from_pretrained(paths["qwen3_moe"])
    merged = PeftModel.from_pretrained(plain, str(tmp_path / "model" / "adapter")).merge_and_unload()
    for (name, ours), theirs in zip(loaded.named_parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0, msg=name)


def test_experts_learn_and_nothing_but_adapters_does(
    make_trainer: Make, make_rows: MakeRows, weights_of: Callable[..., Any], paths: dict[str, str]
) -> None:
    config = LoraConfig(rank=4, target_modules=["experts.down_proj"])
    trainer = make_trainer(path=paths["qwen3_moe"], lora=config, lr=1e-2)
    origin = load_file(Path(paths["qwen3_moe"]) / "model.safetensors")
    assert all(torch.equal(weight, origin[name]) for name, weight in weights_of(trainer).items())
    losses = [trainer.update(make_rows(6), sft_loss).metrics["actor/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    base = dict(load_causal_lm(paths["qwen3_moe"]).named_parameters())
    for name, parameter in trainer.model.lm.named_parameters():
        assert is_adapter(name) == parameter.requires_grad
        assert is_adapter(name) or torch.equal(parameter.full_tensor(), base[hf_name(name)])
    names = [adapter.name for adapter in adapters(trainer.model.lm)]
    assert names == [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)]
    assert len({piece.name for piece in trainer.engine.state()}) == 2 * 2 * 3  # A, B and their moments


def test_a_checkpoint_of_adapters_of_experts_is_gone_on_from(
    make_trainer: Make, make_rows: MakeRows, paths: dict[str, str]
) -> None:
    before = trained(make_trainer, make_rows, paths["mixtral"])
    state = {piece.name: piece.values.clone() for piece in before.engine.state()}
    after = make_trainer(path=paths["mixtral"], lora=EXPERTS)
    for piece in after.engine.state():
        piece.values.copy_(state[piece.name])
    after.engine.loaded(before.engine.num_optimizer_steps())
    for ours, theirs in zip(after.logprobs(make_rows(4)), before.logprobs(make_rows(4)), strict=True):
        assert (ours == theirs).all()


def test_all_linear_says_what_it_takes_of_a_mixture_and_what_it_leaves(
    paths: dict[str, str], make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        trainer = make_trainer(path=paths["qwen3_moe"], lora=LoraConfig(rank=4))
    assert {adapter.name.split(".")[-2] for adapter in adapters(trainer.model.lm)} == {
        "q_proj", "k_proj", "v_proj", "o_proj"
    }  # fmt: skip
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "trainer.lora.target_modules=[all-linear]: k_proj, o_proj, q_proj, v_proj get adapters; the experts, 28% of "
        "the weights, are stacked and get none. Name them to train them, too: [all-linear,down_proj,gate_up_proj]."
    )
    lm = load_causal_lm(paths["qwen3_moe"])
    both = find_targets(lm, LoraConfig(rank=4, target_modules=["all-linear", "down_proj"]))
    assert (len(both.layers), len(both.experts)) == (8, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["up_proj"]}, r"no linear layer .* There are k_proj, .*, and of experts down_proj, gate_u"),
        ({"publish": "adapter"}, r"lora\.publish=adapter: .* names experts \(.*gate_up_proj\)\. Set .*publish=merged"),
    ],
)
def test_experts_that_cannot_have_an_adapter_are_refused_by_name(
    make_trainer: Make, paths: dict[str, str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(
            path=paths["qwen3_moe"], lora=LoraConfig(**{"rank": 4, "target_modules": ["gate_up_proj"]} | options)
        )


def test_experts_that_are_stored_turned_are_not_offered() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_local_experts": 2, "head_dim": 4}
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, vocab_size=8, num_attention_heads=2))
    with pytest.raises(ConfigError, match=r"no linear layer of GptOss.* There are k_proj, o_proj, q_proj, v_proj; "):
        find_targets(lm, LoraConfig(rank=4, target_modules=["gate_up_proj"]))


def test_adapters_of_experts_are_not_split(make_trainer: Make, paths: dict[str, str]) -> None:
    trainer = make_trainer(path=paths["mixtral"], lora=EXPERTS)
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel_size=2: adapters of experts .* are not split"):
        split_plan(trainer.model.lm, 2)


def test_adapters_of_experts_are_not_compiled(make_trainer: Make, paths: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.compile=true: .* trainer\.lora\.target_modules .* experts"):
        make_trainer(path=paths["qwen3_moe"], lora=EXPERTS, compile=True)
