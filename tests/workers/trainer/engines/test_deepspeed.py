"""Tests of DeepSpeed alone. What it has in common with FSDP2: `test_trainer.py`, `test_ranks.py`, and others."""

import builtins
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ConfigError
from penstock.conf.trainer import DeepSpeedConfig, OptimizerConfig, TrainerConfig
from penstock.workers.trainer.engines.deepspeed import DeepSpeedEngine, load_deepspeed, settings
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from tests.workers.trainer.conftest import assert_same, put_state, random_rows, whole_state

Make = Callable[..., PolicyTrainer]
STAGES = ("zero1", "zero2", "zero3")


@pytest.fixture(params=STAGES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_configured_engine_trains(make_trainer: Make, engine: str) -> None:
    made = make_trainer().engine
    assert isinstance(made, DeepSpeedEngine)
    assert f"zero{made.stage}" == engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_masters_make_the_same_steps(make_trainer: Make, engine: str, dtype: str) -> None:
    rows, logprobs = random_rows(8), []
    for offload in (False, True):
        trainer = make_trainer(lr=1e-2, dtype=dtype, offload=offload, max_tokens_per_microbatch=60)
        for _ in range(3):
            trainer.update(rows, sft_loss)
        logprobs.append(np.concatenate(trainer.logprobs(rows)))
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=1e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"offload": True}], ids=["", "bfloat16", "offloaded"])
def test_an_engine_that_left_its_device_makes_the_same_steps(
    make_trainer: Make, engine: str, options: dict[str, Any]
) -> None:
    """The host is the device here: what is moved stays, and all that DeepSpeed unlinks and links happens."""
    if engine == "zero1" and "dtype" in options:  # DeepSpeed cannot move that optimizer: conf/run.py refuses it
        return
    stays, leaves = (make_trainer(lr=1e-2, **options) for _ in range(2))
    for seed in range(3):
        for trainer in (stays, leaves):
            trainer.update(random_rows(4, seed=seed), sft_loss)
        leaves.engine.leave_device()
        leaves.engine.take_device()
    state = whole_state(stays)
    assert_same(whole_state(leaves), state)
    put_state(leaves, {name: values * 0.5 for name, values in state.items()}, 3)
    put_state(stays, {name: values * 0.5 for name, values in state.items()}, 3)
    for ours, expected in zip(*(trainer.logprobs(random_rows(4)) for trainer in (leaves, stays)), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_scorer_that_left_its_device_scores_the_same(make_trainer: Make) -> None:
    scorer, rows = make_trainer(trainable=False), random_rows(4)
    expected = scorer.logprobs(rows)
    for _ in range(2):
        scorer.engine.leave_device()
        scorer.engine.take_device()
        for ours, before in zip(scorer.logprobs(rows), expected, strict=True):
            np.testing.assert_array_equal(ours, before)


def test_masters_start_as_loaded_however_coarse_the_compute_dtype(
    make_trainer: Make, weights_of: Callable[..., Any]
) -> None:
    exact = weights_of(make_trainer())
    ours = weights_of(make_trainer(dtype="bfloat16"))
    assert all(torch.equal(ours[name], weight) for name, weight in exact.items())


def test_a_step_that_is_not_finite_leaves_the_optimizer_too(make_trainer: Make, engine: str) -> None:
    for dtype in ("float32", "bfloat16"):
        trainer, rows = make_trainer(lr=1e-2, dtype=dtype), random_rows(4)
        trainer.update(rows, sft_loss)
        before = [(piece.name, piece.values.clone()) for piece in trainer.engine.state()]
        for bad in (float("nan"), float("inf")):
            trainer.update(rows, lambda logprobs, bad=bad: (logprobs.sum() * bad, {}))
        assert trainer.engine.num_optimizer_steps() == 1
        for (name, values), piece in zip(before, trainer.engine.state(), strict=True):
            assert torch.equal(values, piece.values), name


def test_critic_and_policy_share_a_process(make_trainer: Make) -> None:
    policy, second = make_trainer(lr=1e-2), make_trainer(lr=1e-3)
    rows = random_rows(6)
    losses = [trainer.update(rows, sft_loss).metrics["actor/loss"] for trainer in (policy, second, policy, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[2] < losses[3] < losses[0]


def test_its_own_process_groups_keep_the_trainers_deadline(make_trainer: Make) -> None:
    made = make_trainer(collective_timeout_s=77.0).engine
    assert isinstance(made, DeepSpeedEngine)
    backend = made.deepspeed.data_parallel_group._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 77.0


def test_another_launchers_environment_is_not_believed(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = {"RANK": "3", "WORLD_SIZE": "9", "LOCAL_RANK": "5", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    for name, value in (foreign | {"OMPI_COMM_WORLD_LOCAL_RANK": "7"}).items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer()
    assert trainer.update(random_rows(4), sft_loss).num_samples == 4


def test_nothing_but_the_fused_adamw_of_torch_is_used_and_nothing_is_compiled(
    make_trainer: Make, engine: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    trainer = make_trainer(offload=True)
    trainer.update(random_rows(4), sft_loss)
    assert isinstance(trainer.engine, DeepSpeedEngine)
    assert type(trainer.engine.optimizer) is torch.optim.AdamW
    assert not os.listdir(tmp_path)


def test_its_settings_are_those_of_the_trainer() -> None:
    config = TrainerConfig(
        engine="deepspeed",
        dtype="bfloat16",
        deepspeed=DeepSpeedConfig(zero_stage=3),
        offload=True,
        optimizer=OptimizerConfig(clip_norm=0.7),
    )
    ours = settings(config, "cuda", 1000)
    assert ours["gradient_clipping"] == 0.7
    assert ours["bf16"]["enabled"]
    assert ours["zero_optimization"]["stage"] == 3
    assert ours["zero_optimization"]["reduce_bucket_size"] == 1000
    assert ours["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_optimizer" not in settings(config, "cpu", 0)["zero_optimization"]


def test_a_missing_package_is_named(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_trainer().ranks
    plain = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "deepspeed":
            raise ImportError("No module named 'deepspeed'")
        return plain(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"trainer.engine=deepspeed.*No module named.*trainer.engine=fsdp"):
        load_deepspeed(ranks)


def test_a_device_that_it_does_not_compute_on_is_refused(make_trainer: Make) -> None:
    elsewhere = replace(make_trainer().ranks, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"computes on cpu, this trainer on cuda.*num_gpus_per_rank"):
        load_deepspeed(elsewhere)


@pytest.mark.real
def test_fsdp_does_not_import_it() -> None:
    program = "import sys, penstock.workers.trainer.policy_trainer; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
