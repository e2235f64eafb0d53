"""Benchmarks for GPUs end at once on a machine without one, and what they would run can be read here."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.first_minutes import run_part
from benchmarks.gpu.learning import SHARES, words
from benchmarks.gpu.training import PROMPT_TOKENS, random_rows, settings
from penstock.conf.trainer import TrainerConfig
from penstock.conf.weights import choose_transport
from penstock.orchestrator.configuration.compose import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.real
@pytest.mark.parametrize("name", ["weights", "training", "learning"])
def test_without_a_gpu_a_benchmark_says_so_in_one_line(name: str, tmp_path: Path, warm_python: list[str]) -> None:
    file = tmp_path / "result.json"
    done = subprocess.run(
        [*warm_python, "-m", f"benchmarks.gpu.{name}", "--json", str(file)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "benchmarks.gpu" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"benchmarks.gpu.{name}: torch ")
    assert "finds no GPU" in lines[0]
    assert "Traceback" not in done.stderr
    assert not file.exists()


@pytest.mark.real
def test_the_first_minutes_go_on_after_a_part_that_fails(tmp_path: Path) -> None:
    assert run_part("update", tmp_path, 0.01)["status"] == "not done within 0 s"
    rehearsed = [run_part(name, tmp_path, 120) for name in ("packages", "nccl", "ipc")]
    assert [line["status"] for line in rehearsed] == ["ok", "ok", "ok"], rehearsed
    assert rehearsed[1]["facts"]["backend"] == "gloo"


@pytest.mark.parametrize("transport", SHARES)
@pytest.mark.parametrize("quick", [False, True])
def test_the_runs_that_learn_are_configured_for_their_transport(transport: str, quick: bool, tmp_path: Path) -> None:
    config = load_config(words(transport, 0, tmp_path, quick=quick))
    assert choose_transport(config) == transport
    assert "trainer.num_gpus_per_rank=1" in config.warm_start.overrides
    assert (config.trainer.dtype, config.rollout.dtype) == ("bfloat16", "bfloat16")


def test_the_rows_of_the_update_are_long_tailed_and_within_bounds() -> None:
    rows = random_rows(64, 2048, seed=0)
    lengths = rows.lengths("response_ids")
    assert lengths.max() <= 2048
    assert lengths.max() > 2 * lengths.mean()
    assert set(rows.lengths("prompt_ids")) == {PROMPT_TOKENS}


def test_what_the_trainer_can_be_told_is_measured_one_by_one() -> None:
    measured = {setting.name: setting.options for setting in settings()}
    assert measured["sdpa, kept"] == {}
    assert measured["sdpa, recomputed"] == {"activation_checkpointing": True}
    assert measured["sdpa, shared prefixes"] == {"share_prefixes": "always"}
    assert all(TrainerConfig(**options) for options in measured.values())
