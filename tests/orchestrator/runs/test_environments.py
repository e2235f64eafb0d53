"""Whole runs in an environment of two turns: with `max_staleness=0` they are a straight line bit for bit, and the death
of an engine or of an environment changes nothing."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.conf.errors import ConfigError
from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import RunResult, run
from penstock.workers.fresh_model import build_fresh_model
from tests.orchestrator.runs import reference_loop
from tests.orchestrator.runs.killing import Killing
from tests.run_files import events_of, metrics_of, sampled_difference, samples_of

pytestmark = pytest.mark.real

GAME = Path(__file__).parent / "digits_game.py"
STEPS = 5


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_fresh_model(path, FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=128), seed=3)
    return str(path)


def settings(model_path: str, directory: Path, *more: str) -> Any:
    return load_config(
        [
            f"model.path={model_path}", f"environment.name={GAME}:Digits", "data.source=environment",
            "rollout.engine=hf", "rollout.num_workers=2", "rollout.sampling.max_tokens=12", "rollout.num_threads=1",
            "trainer.num_threads=1", "trainer.share_prefixes=never",
            f"trainer.max_steps={STEPS}", "trainer.groups_per_step=4",
            "algorithm.group_size=4", "trainer.optimizer.lr=1e-3", f"output_dir={directory}", "faults.pause_s=0.1",
            *more,
        ]
    )  # fmt: skip


def weights_of(result: RunResult) -> dict[str, torch.Tensor]:
    return dict(load_file(result.model / "model.safetensors"))


@pytest.fixture(scope="module")
def straight(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    threads = torch.get_num_threads()
    try:
        return reference_loop.train_in_two_turns(settings(model_path, tmp_path_factory.mktemp("line")), model_path)
    finally:
        torch.set_num_threads(threads)


def different(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    assert sorted(found) == sorted(expected)
    return [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.mark.promise("4 environment")
def test_two_turns_equal_the_straight_line_bit_for_bit(
    tmp_path: Path, cluster: str, model_path: str, straight: dict[str, torch.Tensor]
) -> None:
    result = run(settings(model_path, tmp_path, "name=exact", "environment.num_workers=2"), quiet=True)
    assert not different(weights_of(result), straight)
    start = load_file(Path(model_path) / "model.safetensors")
    assert different(start, straight), "nothing was trained"
    lines = metrics_of(result.directory)
    assert [line["environment/turns"] for line in lines] == [32.0] * STEPS
    assert all(line["mismatch/logprob_abs_mean"] < 1e-5 for line in lines)
    assert [line["staleness/max"] for line in lines] == [0.0] * STEPS


def test_each_turn_is_trained_at_the_temperature_that_it_was_sampled_at(
    tmp_path: Path, cluster: str, model_path: str
) -> None:
    words = ["environment.options.temperature=0.5", "rollout.sampling.temperature=1.5", "trainer.max_steps=2"]
    lines = metrics_of(run(settings(model_path, tmp_path, *words, "name=cool"), quiet=True).directory)
    assert all(line["mismatch/logprob_abs_max"] < 1e-4 for line in lines)


@pytest.mark.parametrize(
    "name", ["Rollout-1", pytest.param("Environment-0", marks=pytest.mark.promise("4 environment"))]
)
def test_a_death_changes_nothing(
    tmp_path: Path, cluster: str, model_path: str, straight: dict[str, torch.Tensor], name: str
) -> None:
    config = settings(model_path, tmp_path, "name=killed")
    result = run(config, quiet=True, sinks=[Killing(tmp_path / "killed", name, 2)])
    assert not different(weights_of(result), straight)
    recovered = [event["member"] for event in events_of(result.directory) if event["kind"] == "recovered"]
    assert recovered == [name]


def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(
    tmp_path: Path, cluster: str, model_path: str, straight: dict[str, torch.Tensor]
) -> None:
    words = ["name=parts", "checkpoint.every_steps=2"]
    run(settings(model_path, tmp_path, *words, "trainer.max_steps=3"), quiet=True)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "global_step_3")  # as if it was killed before that
    result = run(settings(model_path, tmp_path, *words, "resume=auto"), quiet=True)
    assert [line["step"] for line in metrics_of(result.directory)] == [1, 2, 3, 4, 5]
    assert not different(weights_of(result), straight)


def test_an_asynchronous_run_keeps_trajectories_and_versions_change_in_bounds(
    tmp_path: Path, cluster: str, model_path: str
) -> None:
    """Versions change in the middle of trajectories."""
    words = ["name=ahead", "checkpoint.every_steps=2", "max_staleness=2"]
    run(settings(model_path, tmp_path, *words, "trainer.max_steps=3"), quiet=True)
    shutil.rmtree(tmp_path / "ahead" / "checkpoints" / "global_step_3")
    result = run(settings(model_path, tmp_path, *words, "resume=auto"), quiet=True)
    lines = metrics_of(result.directory)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["staleness/max"] for line in lines) in (1.0, 2.0)
    assert not any(line.get("dropped/stale") for line in lines)


def test_attempts_that_outlast_the_bound_are_trained_by_their_young_turns(
    tmp_path: Path, cluster: str, model_path: str
) -> None:
    """One task in eight takes its time between its turns, while others overtake it."""
    words = [f"environment.name={GAME}:SlowDigits", "environment.old_turns=context", "max_staleness=1"]
    words += ["store.window=64", "trainer.max_steps=16", "trainer.groups_per_step=2", "name=slow"]
    words += ["tracking.samples_every_steps=1"]
    result = run(settings(model_path, tmp_path, *words), quiet=True)
    lines = metrics_of(result.directory)
    assert len(lines) == 16
    assert max(line["staleness/max"] for line in lines) <= 1.0
    # Of a row with a turn left out, fewer tokens are trained than two turns have.
    shortest = min(line["response_length/mean"] for line in lines)
    longest = max(line["response_length/mean"] for line in lines)
    assert shortest < longest
    for line in lines:
        rows = samples_of(result.directory, line["step"])
        known = [value is not None for row in rows for value in row["trainer_logprobs"]]
        trained = line["response_length/mean"] * len(rows)
        assert sum(known) == pytest.approx(trained)  # the tokens of old turns have no value
        for age, name in enumerate(("mismatch/logprob_abs_mean", "lag/logprob_abs_mean@1")):
            sampled = sampled_difference(result.directory, line["step"], age, by_turn=True)  # `hf` keeps its caches
            assert sampled == pytest.approx(line.get(name, math.nan), rel=1e-3, nan_ok=True)


def test_a_window_beyond_the_bound_is_refused_where_old_turns_are(tmp_path: Path, model_path: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.window=64"):
        settings(model_path, tmp_path, "store.window=64", "max_staleness=1")
