"""Adapters on one rank. On more of them: `test_ranks_parallel.py`."""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.algorithms.losses import ppo_clip_loss, sft_loss
from penstock.conf.errors import ConfigError
from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import LoraConfig, PolicyConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import Publication
from penstock.workers.trainer import policy_trainer
from penstock.workers.trainer.engines.lora import hf_name, is_adapter
from penstock.workers.trainer.models.language_model import load_causal_lm
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.scalar import ScalarTrainer
from penstock.workers.weights.publication.adapter import (
    adapted_layers,
    adapter_layout,
    find_targets,
    layer_shapes,
    published_factors,
)
from penstock.workers.weights.publication.publication_files import WEIGHTS_NAME, MappedWeights, open_publication
from tests.model_files import logprobs_by
from tests.workers.weights.chain.relays import Cluster

Make = Callable[..., PolicyTrainer]
MakeRows = Callable[..., Rows]
Weights = Callable[[PolicyTrainer], dict[str, Tensor]]
LORA = LoraConfig(rank=4, alpha=12)
ALONE = LoraConfig(rank=4, alpha=12, publish="adapter")


def trained(make_trainer: Make, make_rows: MakeRows, **options: Any) -> PolicyTrainer:
    trainer = make_trainer(**{"lora": LORA, "lr": 1e-2} | options)
    for seed in range(3):
        trainer.update(make_rows(6, seed=seed), sft_loss)
    return trainer


TWO = {
    "lora": ALONE,
    "policies": {"solver": PolicyConfig(), "proposer": PolicyConfig(every=2, optimizer={"lr": 3e-2})},
}
COSINE = {"lr": 1e-2, "schedule": "cosine", "weight_decay": 0.1, "max_steps": 6}


def state_of(trainer: PolicyTrainer, policy: str = "") -> dict[str, Tensor]:
    """Weights and moments, of a policy alone by the names that they have where it is the only one."""
    pieces = {piece.name: piece.values.clone() for piece in trainer.engine.state()}
    own = {name: values for name, values in pieces.items() if name.endswith(f".{policy}.weight")}
    return {name.replace(f".{policy}.", ".default."): values for name, values in own.items()} if policy else pieces


def is_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in expected)


def train_two(trainer: PolicyTrainer, make_rows: MakeRows) -> None:
    """Three updates of the solver, and two of the proposer between them."""
    for seed in range(3):
        trainer.update(make_rows(6, seed=seed), ppo_clip_loss)
        if seed < 2:
            with trainer.using("proposer"):
                trainer.update(make_rows(4, seed=10 + seed), sft_loss)


def test_two_adapters_end_with_the_bits_of_each_alone(make_trainer: Make, make_rows: MakeRows, tmp_path: Path) -> None:
    both, solver, proposer = (
        make_trainer(**COSINE, **TWO),
        make_trainer(**COSINE, lora=TWO["lora"]),
        make_trainer(**COSINE | {"lr": 3e-2, "max_steps": 3}, lora=TWO["lora"]),
    )
    train_two(both, make_rows)
    for seed in range(3):
        solver.update(make_rows(6, seed=seed), ppo_clip_loss)
    for seed in range(2):
        proposer.update(make_rows(4, seed=10 + seed), sft_loss)
    counted = {name: count.tolist() for name, count in both.counters.items()}
    assert counted == {"counters/solver": [3, 3], "counters/proposer": [2, 2]}
    both.export(str(tmp_path / "both"))
    for name, alone in (("solver", solver), ("proposer", proposer)):
        assert is_same(state_of(both, name), state_of(alone))
        alone.export(str(tmp_path / name))
        for file in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
            assert (tmp_path / "both" / name / file).read_bytes() == (tmp_path / name / file).read_bytes(), file
        assert (tmp_path / "both" / name / "config.json").exists()
        with both.using(name):
            rows = make_rows(4)
            for ours, theirs in zip(both.logprobs(rows), alone.logprobs(rows), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert not (tmp_path / "both" / "model.safetensors").exists()


def test_the_use_of_one_adapter_leaves_the_other_as_it_is(make_trainer: Make, make_rows: MakeRows) -> None:
    trainer = make_trainer(**COSINE, **TWO)
    train_two(trainer, make_rows)
    before = state_of(trainer, "solver")
    with trainer.using("proposer"):
        metrics = trainer.update(make_rows(4, seed=7), sft_loss).metrics
    assert metrics["actor/lr"] == pytest.approx(3e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 2 / 3))))
    assert is_same(state_of(trainer, "solver"), before)
    assert trainer.policy == "solver"
    assert trainer.num_updates == 3
    assert trainer.engine.num_optimizer_steps() == 3
    assert not is_same(state_of(trainer, "proposer"), before)


def test_two_adapters_are_published_in_one_file(
    make_trainer: Make, make_rows: MakeRows, model_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(**COSINE, **TWO)
    hashes = [trainer.hash_of_weights()]
    train_two(trainer, make_rows)
    hashes.append(trainer.hash_of_weights())
    with trainer.using("proposer"):
        trainer.update(make_rows(4, seed=7), sft_loss)
        assert trainer.hash_of_weights() not in hashes
    trainer.publish(str(tmp_path), 1)
    trainer.export(str(tmp_path / "model"))
    policies = tuple(TWO["policies"])
    manifest = open_publication(trainer.publish(str(tmp_path), 2))
    assert layer_shapes(manifest, ALONE, policies) == adapted_layers(model_path, ALONE)
    published = load_file(tmp_path / "v00000001" / "model.safetensors")
    exported = {
        f"{name}/{key}": values
        for name in policies
        for key, values in load_file(tmp_path / "model" / name / "adapter" / "adapter_model.safetensors").items()
    }
    assert is_same(published, exported)


@pytest.mark.parametrize("taken", ["update", "keys"])
def test_a_policy_that_modules_have_no_room_for_is_refused(make_trainer: Make, taken: str) -> None:
    with pytest.raises(ConfigError, match=rf"flow\.train\('{taken}'\): torch's modules have a method of this name"):
        make_trainer(lora=ALONE, policies={"solver": PolicyConfig(), taken: PolicyConfig()})


def test_a_new_adapter_changes_no_weight(make_trainer: Make, weights_of: Weights, model_path: str) -> None:
    original = load_file(Path(model_path) / "model.safetensors")
    published = weights_of(make_trainer(lora=LORA))
    assert published.keys() == original.keys()
    assert all(torch.equal(published[name], weight) for name, weight in original.items())


def test_only_adapters_are_trained_and_only_they_have_optimizer_state(
    make_trainer: Make, make_rows: MakeRows, model_path: str
) -> None:
    trainer = trained(make_trainer, make_rows)
    original = dict(AutoModelForCausalLM.from_pretrained(model_path).named_parameters())
    for name, parameter in trainer.model.lm.named_parameters():
        value = parameter.full_tensor()
        if is_adapter(name):
            assert parameter.requires_grad
            assert value.abs().max() > 0, name
        else:
            assert torch.equal(value, original[hf_name(name)]), name
    kinds = {piece.name.partition("/")[0] for piece in trainer.engine.state()}
    names = {piece.name.partition("/")[2] for piece in trainer.engine.state()}
    assert kinds == {"weights", "exp_avg", "exp_avg_sq"}
    assert names == {name for name, _ in trainer.model.lm.named_parameters() if is_adapter(name)}
    assert len(trainer.engine.optimizer.state) == len(names) == 2 * 2 * 7


@pytest.mark.parametrize("scalar", [False, True])
def test_what_is_frozen_is_kept_in_the_dtype_that_it_is_computed_with(model_path: str, scalar: bool) -> None:
    for dtype in ("bfloat16", "float32"):
        trainer = (ScalarTrainer if scalar else PolicyTrainer)(TrainerConfig(lora=LORA, dtype=dtype), model_path)
        for name, parameter in trainer.model.lm.named_parameters():
            wanted = torch.float32 if is_adapter(name) or "score" in name else getattr(torch, dtype)
            assert parameter.dtype == wanted, name
        trainer.close()


def test_training_in_bfloat16_needs_no_float32_of_what_is_frozen(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights, model_path: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same updates bit for bit as with float32 masters of everything, also as published and saved."""
    path = tmp_path / "model"
    shutil.copytree(model_path, path)
    stored = load_file(path / "model.safetensors")
    in_bfloat16 = {name: weight.bfloat16() for name, weight in stored.items()}
    save_file(in_bfloat16, path / "model.safetensors", metadata={"format": "pt"})
    found = []
    for masters in (True, False):
        if masters:
            monkeypatch.setattr(policy_trainer, "keep_frozen_in", lambda *_: None)
        trainer = trained(make_trainer, make_rows, path=str(path), dtype="bfloat16")
        dtypes = {parameter.dtype for parameter in trainer.model.lm.parameters()}
        assert (torch.bfloat16 in dtypes) != masters
        state = {piece.name: piece.values.clone() for piece in trainer.engine.state()}
        trainer.export(str(tmp_path / f"exported {masters}"))
        exported = load_file(tmp_path / f"exported {masters}" / "model.safetensors")
        merged = {name: weight.float() for name, weight in weights_of(trainer).items()}
        found.append((state, merged, exported))
        monkeypatch.undo()
    for ours, theirs in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_published_is_what_peft_merges(
    make_trainer: Make, make_rows: MakeRows, model_path: str, tmp_path: Path
) -> None:
    trainer = trained(make_trainer, make_rows)
    trainer.publish(str(tmp_path), 1)
    trainer.export(str(tmp_path / "model"))
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    merged = PeftModel.from_pretrained(plain, str(tmp_path / "model" / "adapter")).merge_and_unload()
    published = load_file(tmp_path / "v00000001" / "model.safetensors")
    expected = {name: parameter.detach() for name, parameter in merged.named_parameters()}
    assert published.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(published[name], weight, atol=1e-6, rtol=0, msg=name)


def test_an_adapter_published_alone_is_the_one_that_peft_loads(
    make_trainer: Make, make_rows: MakeRows, tmp_path: Path
) -> None:
    trainer = trained(make_trainer, make_rows, lora=ALONE)
    publication = trainer.publish(str(tmp_path), 1)
    trainer.export(str(tmp_path / "model"))
    published = load_file(tmp_path / "v00000001" / "model.safetensors")
    exported = load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
    assert published.keys() == exported.keys()
    assert all(torch.equal(published[name], weight) for name, weight in exported.items())
    num_bytes = sum(weight.numel() * 4 for weight in exported.values())
    assert num_bytes < publication.num_bytes == num_bytes + published_header(publication)


def published_header(publication: Publication) -> int:
    return len(open_publication(publication).layout.header)


def test_what_is_published_alone_adds_up_to_what_is_published_merged(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights, model_path: str, tmp_path: Path
) -> None:
    trainer = trained(make_trainer, make_rows, lora=ALONE)
    base = load_file(Path(model_path) / "model.safetensors")
    merged = weights_of(trainer)
    mapped = MappedWeights(trainer.publish(str(tmp_path), 1))
    factors = published_factors(mapped)
    changes = {f"{layer}.weight": torch.from_numpy(b @ a) * 3.0 for layer, (a, b) in factors.items()}
    assert len(changes) == 14
    for name, weight in merged.items():
        expected = base[name] + changes[name] if name in changes else base[name]
        torch.testing.assert_close(weight, expected, atol=1e-7, rtol=0, msg=name)


def test_an_adapter_goes_to_other_nodes_as_a_model_does(
    make_trainer: Make, make_rows: MakeRows, tmp_path: Path
) -> None:
    trainer = trained(make_trainer, make_rows, lora=ALONE)
    here = Path(trainer.publish(str(tmp_path / "here"), 1).directory)
    with Cluster(tmp_path, trainer.plan_chunks("x", num_receivers=2), ["a", "b"]) as cluster:
        cluster.begin(1)
        trainer.publish(str(cluster.roots["x"]), 1)
        for node in cluster.receivers:
            there = cluster.relays[node].wait(1, 60)
            assert layer_shapes(open_publication(there), ALONE)
            assert (Path(there.directory) / WEIGHTS_NAME).read_bytes() == (here / WEIGHTS_NAME).read_bytes()


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"]])
def test_an_engine_knows_the_layers_of_an_adapter_before_it_sees_one(
    make_trainer: Make, model_path: str, tmp_path: Path, targets: list[str]
) -> None:
    config = replace(ALONE, target_modules=targets)
    manifest = open_publication(make_trainer(lora=config).publish(str(tmp_path), 1))
    layers = adapted_layers(model_path, config)
    assert layer_shapes(manifest, config) == layers
    assert adapter_layout(layers, config, "float32") == manifest.layout


def test_a_reference_beside_a_trained_adapter_has_the_whole_model(
    make_trainer: Make, weights_of: Weights, tmp_path: Path
) -> None:
    reference = make_trainer(lora=ALONE, trainable=False)
    reference.publish(str(tmp_path), 1)
    assert load_file(tmp_path / "v00000001" / "model.safetensors").keys() == weights_of(reference).keys()


def test_an_export_loads_with_the_logits_of_what_was_trained(
    make_trainer: Make, make_rows: MakeRows, tmp_path: Path
) -> None:
    trainer, rows = trained(make_trainer, make_rows), make_rows(1)
    trainer.export(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(
        torch.from_numpy(trainer.logprobs(rows)[0]), logprobs_by(loaded, rows), atol=1e-5, rtol=0
    )


def test_the_loss_falls(make_trainer: Make) -> None:
    trainer = make_trainer(lora=LORA, lr=1e-2)
    rows = Rows.from_lists({"prompt_ids": [[5, 6]] * 4, "response_ids": [[7, 8, 9, 10]] * 4})
    losses = [trainer.update(rows, sft_loss).metrics["actor/loss"] for _ in range(20)]
    assert losses[-1] < losses[0] - 0.3  # frozen random embeddings, 0.02 wide, allow no more than 0.6


def test_a_critic_trains_its_head_whole(model_path: str, make_rows: MakeRows) -> None:
    critic = ScalarTrainer(TrainerConfig(lora=LORA), model_path)
    whole = [name for name, parameter in critic.model.lm.named_parameters() if parameter.requires_grad]
    assert [name for name in whole if not is_adapter(name)] == ["score.weight"]
    critic.close()


def test_a_reference_has_no_adapter(make_trainer: Make) -> None:
    reference = make_trainer(lora=LORA, trainable=False)
    assert not any(is_adapter(name) for name, _ in reference.model.named_parameters())


def test_targets_are_ends_of_names(model_path: str) -> None:
    lm = load_causal_lm(model_path)
    assert find_targets(lm, replace(LORA, target_modules=["q_proj", "1.mlp.up_proj"])).layers == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    ]  # fmt: skip
    assert len(find_targets(lm, LORA).layers) == 14


@pytest.mark.parametrize("target", ["c_attn", "lm_head", "proj", "embed_tokens"])
def test_a_target_that_names_no_linear_layer_is_refused_with_those_that_exist(make_trainer: Make, target: str) -> None:
    message = rf"no linear layer of Qwen2ForCausalLM is called '{target}'\. There are down_proj, gate_proj, k_proj, "
    with pytest.raises(ConfigError, match=message):
        make_trainer(lora=LoraConfig(rank=4, target_modules=["q_proj", target]))


@pytest.mark.real
def test_vllm_serves_the_exported_adapter_with_the_trainers_logprobs(
    make_trainer: Make, tmp_path: Path, warm_python: list[str]
) -> None:
    base = str(tmp_path / "base")
    shape = FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2)
    build_fresh_model(base, shape, seed=3)
    rows = Rows.from_lists({"prompt_ids": [[5, 6, 7, 8]], "response_ids": [[7, 8, 9, 10, 11, 12]]})
    trainer = make_trainer(base, lora=LoraConfig(rank=8), lr=1e-2)
    before = trainer.logprobs(rows)[0]
    for _ in range(5):
        trainer.update(rows, sft_loss)
    trainer.export(str(tmp_path / "model"))
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [*warm_python, str(Path(__file__).with_name("vllm_adapter.py"))]
    words = [base, str(tmp_path / "model" / "adapter"), "5,6,7,8,7,8,9,10,11,12"]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    served = np.array(json.loads(done.stdout.splitlines()[-1])[3:])
    np.testing.assert_allclose(served, trainer.logprobs(rows)[0], atol=1e-5)
    assert np.abs(served - before).max() > 0.1
