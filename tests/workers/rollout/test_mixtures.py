"""Mixtures of experts in engines: what they are sent of the trainer's model is the trainer's model."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Completion, EngineSpec, RolloutEngine, Sampling
from penstock.workers.rollout.rollout_engines import make_engine
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.weights.publication.publication_files import MappedWeights
from penstock.workers.weights.weight_senders import SendingRank, StreamTransport
from tests.mixtures import build_mixture

PROMPT = [5, 6, 7, 20, 30]
VLLM = pytest.mark.real


def rows_of(completions: list[Completion]) -> Rows:
    return Rows.from_lists(
        {"prompt_ids": [PROMPT] * len(completions), "response_ids": [some.token_ids for some in completions]}
    )


def gap(trainer: PolicyTrainer, completions: list[Completion]) -> float:
    """Largest distance of the engine's log-probabilities from the trainer's."""
    ours = trainer.logprobs(rows_of(completions))
    return max(float(np.abs(mine - some.logprobs).max()) for mine, some in zip(ours, completions, strict=True))


async def gaps_of_versions(engine: RolloutEngine, trainer: PolicyTrainer, directory: str) -> list[float]:
    """Gaps of the weights that the engine starts with, one tensor an expert, of the same in stacks, which have the same
    bits, and of those of two publications."""
    gaps, sampling, first = [], Sampling(max_tokens=12, seed=3, ignore_eos=True), list[list[float]]()
    await engine.start()
    try:
        for version in range(4):
            if version:
                await engine.load(trainer.publish(directory, version))
            completions = await engine.generate(PROMPT, 4, sampling)
            assert {one for some in completions for one in some.versions} == {version}
            gaps.append(gap(trainer, completions))
            first = first or [list(some.logprobs) for some in completions]
            if version == 1:
                assert [list(some.logprobs) for some in completions] == first
            if version:
                trainer.update(rows_of(completions), sft_loss)
        gaps.append(gap(trainer, completions))  # those of the weights before
    finally:
        await engine.close()
    return gaps


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hf", "qwen3_moe"),
        ("hf", "mixtral"),
        pytest.param("vllm", "qwen3_moe", marks=VLLM),
        pytest.param("vllm", "mixtral", marks=VLLM),
    ],
)
def test_engines_start_from_an_export_and_follow_publications(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, kind: str
) -> None:
    if name == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
        request.getfixturevalue("warm_spawn")
    path = build_mixture(kind, tmp_path / "model")
    trainer = PolicyTrainer(TrainerConfig(optimizer=OptimizerConfig(lr=3e-2)), path)
    trainer.update(Rows.from_lists({"prompt_ids": [[3, 4]], "response_ids": [[9, 8, 7]]}), sft_loss)
    trainer.export(str(tmp_path / "exported"))
    engine = make_engine(
        EngineSpec(
            RolloutConfig(engine=name, max_model_len=64, kv_cache_gib=0.25, enforce_eager=True),
            str(tmp_path / "exported"),
            phase_timeout_s=60,
        )
    )
    *gaps, stale = asyncio.run(gaps_of_versions(engine, trainer, str(tmp_path / "publications")))
    trainer.close()
    assert max(gaps) < 1e-4
    assert stale > 1e-2


def test_a_publication_has_two_tensors_a_layer_of_experts_with_their_bits(tmp_path: Path) -> None:
    path = build_mixture("qwen3_moe", tmp_path / "model")
    trainer = PolicyTrainer(TrainerConfig(), path)
    published = dict(MappedWeights(trainer.publish(str(tmp_path / "publications"), 1)).tensors())
    trainer.close()
    files = load_file(f"{path}/model.safetensors")
    stored, sent = ([name for name in names if ".experts." in name] for names in (files, published))
    assert (len(stored), len(sent)) == (2 * 4 * 3, 2 * 2)
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts"
        for expert, (both, down) in enumerate(
            zip(published[f"{place}.gate_up_proj"], published[f"{place}.down_proj"], strict=True)
        ):
            parts = [files[f"{place}.{expert}.{half}_proj.weight"] for half in ("gate", "up")]
            assert both.equal(torch.cat(parts))
            assert down.equal(files[f"{place}.{expert}.down_proj.weight"])


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_an_export_has_the_tensors_of_its_origin_and_loads(tmp_path: Path, kind: str) -> None:
    path = build_mixture(kind, tmp_path / "model")
    trainer = PolicyTrainer(TrainerConfig(), path)
    trainer.export(str(tmp_path / "exported"))
    trainer.close()
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("exported", "model"))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    loaded, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("exported", "model"))
    assert all(one.equal(other) for one, other in zip(loaded.parameters(), expected.parameters(), strict=True))


def test_a_transport_that_sends_shards_as_they_are_refuses_experts(tmp_path: Path) -> None:
    trainer = PolicyTrainer(TrainerConfig(), build_mixture("qwen3_moe", tmp_path))
    with pytest.raises(ConfigError, match=r"weights\.transport=nccl_m2n sends .*gate_up_proj.*0\.gate_proj\.weight"):
        StreamTransport("nccl_m2n", SendingRank.of(trainer), bucket_mib=1, timeout_s=1.0)
    trainer.close()
