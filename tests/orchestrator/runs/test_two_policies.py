"""Whole runs of two policies that play each other: with `max_staleness=0` they are two straight lines bit for bit, and
neither a death nor an interruption changes anything."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.conf.model import FreshModelConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.run import RunResult, run
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.weights.publication.adapter import tensor_name
from tests.orchestrator.runs import reference_loop
from tests.orchestrator.runs.duel import both
from tests.orchestrator.runs.killing import Killing
from tests.run_files import events_of, metrics_of, samples_of

pytestmark = pytest.mark.real

GAME = Path(__file__).parent / "duel.py"
STEPS, GROUPS, SIZE = 5, 4, 4
Adapters = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_fresh_model(path, FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=128), seed=3)
    return str(path)


def settings(model_path: str, directory: Path, *more: str) -> Any:
    return load_config(
        [
            f"model.path={model_path}", f"environment.name={GAME}:Duel", "data.source=environment",
            "rollout.engine=hf", "rollout.num_workers=2", "rollout.sampling.max_tokens=12", "rollout.num_threads=1",
            "trainer.num_threads=1", f"trainer.max_steps={STEPS}", f"trainer.groups_per_step={GROUPS}",
            f"algorithm.group_size={SIZE}", "trainer.optimizer.lr=1e-2", "trainer.lora.rank=8",
            "trainer.lora.publish=adapter", "trainer.policies.proposer.every=2",
            "trainer.policies.proposer.optimizer={lr: 3e-2}", f"output_dir={directory}", "faults.pause_s=0.1", *more,
        ]
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    threads = torch.get_num_threads()
    config = resolve(settings(model_path, tmp_path_factory.mktemp("lines")), both(SIZE)).config
    try:
        return reference_loop.train_two(config, model_path)
    finally:
        torch.set_num_threads(threads)


def different(result: RunResult, expected: Adapters) -> list[str]:
    """Names of the exported tensors that are not the expected ones, bit for bit."""
    found = []
    for policy, layers in expected.items():
        own = load_file(result.model / policy / "adapter" / "adapter_model.safetensors")
        assert len(own) == 2 * len(layers) > 0
        for layer, factors in layers.items():
            for letter, values in zip("AB", factors, strict=True):
                if not np.array_equal(own[tensor_name(layer, letter)].numpy(), values):
                    found.append(f"{policy}/{layer}.{letter}")
    return found


def test_two_policies_are_two_straight_lines_bit_for_bit(
    tmp_path: Path, cluster: str, model_path: str, straight: Adapters
) -> None:
    words = ["name=exact", "environment.num_workers=2", "tracking.samples_every_steps=1"]
    result = run(settings(model_path, tmp_path, *words), both(SIZE), quiet=True)
    assert different(result, straight) == []
    for policy in straight:
        assert all(np.abs(b).max() > 1e-3 for _, b in straight[policy].values()), "nothing was trained"
    lines = metrics_of(result.directory)
    assert [line["staleness/max"] for line in lines] == [0.0] * STEPS
    assert all(line["mismatch/logprob_abs_max"] < 1e-4 for line in lines)
    left_out = [line["proposer/rows_left_out"] for line in lines]
    assert left_out == [GROUPS * SIZE if step % 2 else 0.0 for step in range(1, STEPS + 1)]
    assert all("solver/pg_loss" in line and line["solver/lr"] == pytest.approx(1e-2) for line in lines)
    assert ["proposer/lr" in line for line in lines] == [step % 2 == 0 for step in range(1, STEPS + 1)]
    said = [row["policy"] for row in samples_of(result.directory, 2)]
    assert {name: said.count(name) for name in said} == dict.fromkeys(straight, GROUPS * SIZE)


@pytest.mark.parametrize("name", ["Rollout-1", "Trainer-policies-0", "Environment-0"])
def test_a_death_changes_nothing(tmp_path: Path, cluster: str, model_path: str, straight: Adapters, name: str) -> None:
    result = run(
        settings(model_path, tmp_path, "name=killed"), both(SIZE), quiet=True,
        sinks=[Killing(tmp_path / "killed", name, 2)],
    )  # fmt: skip
    assert different(result, straight) == []
    recovered = [event["member"] for event in events_of(result.directory) if event["kind"] == "recovered"]
    assert recovered == [name]


def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(
    tmp_path: Path, cluster: str, model_path: str, straight: Adapters
) -> None:
    """It goes on after step 3, of which the proposer has learned in one."""
    words = ["name=parts", "checkpoint.every_steps=1"]
    run(settings(model_path, tmp_path, *words, "trainer.max_steps=4"), both(SIZE), quiet=True)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "global_step_4")  # as if it was killed before that
    result = run(settings(model_path, tmp_path, *words, "resume=auto"), both(SIZE), quiet=True)
    assert [line["step"] for line in metrics_of(result.directory)] == [1, 2, 3, 4, 5]
    assert different(result, straight) == []


def test_engines_and_ranks_that_take_turns_change_no_bit(
    tmp_path: Path, cluster: str, model_path: str, straight: Adapters
) -> None:
    result = run(settings(model_path, tmp_path, "name=turns", "placement=colocated"), both(SIZE), quiet=True)
    assert different(result, straight) == []


def test_an_asynchronous_run_keeps_the_bound(tmp_path: Path, cluster: str, model_path: str) -> None:
    config = settings(model_path, tmp_path, "name=ahead", "max_staleness=2", "trainer.max_steps=8")
    lines = metrics_of(run(config, both(SIZE), quiet=True).directory)
    assert len(lines) == 8
    assert max(line["staleness/max"] for line in lines) in (1.0, 2.0)
    assert not any(line.get("dropped/stale") for line in lines)
