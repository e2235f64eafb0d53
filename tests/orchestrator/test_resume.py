"""Runs that are killed at the worst moment and go on: the same weights, bit for bit, as if nothing had happened."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from penstock.orchestrator.compose import load_config
from penstock.orchestrator.run import run

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def weights(directory):
    with safe_open(Path(directory) / "model" / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def assert_same_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].equal(other[name]), name


def steps_of(directory):
    return [json.loads(line)["step"] for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def words(small_run, tmp_path):
    return [*small_run, "rollout.engine=hf", "checkpoint.every_steps=2", f"output_dir={tmp_path}"]


def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(words, tmp_path):
    whole = run(load_config([*words, "name=whole", "trainer.max_steps=5"]), quiet=True)
    first = run(load_config([*words, "name=parts", "trainer.max_steps=3"]), quiet=True)
    assert steps_of(first.directory) == [1, 2, 3]
    result = run(load_config([*words, "name=parts", "trainer.max_steps=5", "resume=auto"]), quiet=True)
    assert steps_of(result.directory) == [1, 2, 3, 4, 5]
    assert_same_weights(result.directory, whole.directory)
    assert sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()) == [
        "global_step_4", "global_step_5",
    ]  # fmt: skip
