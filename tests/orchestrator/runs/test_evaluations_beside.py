"""Whole runs that train on while a version is evaluated: what is measured is the version that the line names."""

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.run_files import events_of, metrics_of


@pytest.mark.real
@pytest.mark.parametrize("num_engines", [1, 2])
def test_training_goes_on_while_a_version_is_measured(small_run, num_engines, tmp_path, cluster):
    words = [*small_run, "rollout.engine=hf", f"rollout.num_workers={num_engines}", "max_staleness=2", "name=beside"]
    held_out = [word.replace("data.", "evaluation.") for word in small_run if word.startswith("data.path=")]
    words += ["rollout.num_threads=1", "trainer.num_threads=1", "trainer.max_steps=9", *held_out]
    words += ["evaluation.every_steps=4", "evaluation.num_problems=4", "evaluation.overlap=allow"]
    words += ["evaluation.num_samples=4", "checkpoint.every_steps=0", f"output_dir={tmp_path}"]
    result = run(load_config(words), quiet=True)
    lines, steps = metrics_of(result.directory), RunDirectory.open(result.directory).read_metrics()
    assert [line["step"] for line in steps] == list(range(10))
    assert [line["step"] for line in steps if "accuracy/heldout_avg@4" in line] == [0, 4, 8, 9]
    assert all(line["evaluation/step"] == line["step"] for line in lines if "accuracy/heldout" in line)
    own = [line["step"] for line in lines if line.get("evaluation/step") and "reward/mean" not in line]
    assert own == [4, 8]  # lines of their own, as the steps' had been written
    assert max(line.get("staleness/max", 0) for line in lines) <= 2
    assert not {event["kind"] for event in events_of(result.directory)} & {"fault", "reconnected", "evaluation_lost"}


@pytest.mark.real
def test_engines_of_evaluations_alone_measure_the_same_bits_as_a_blocking_one(small_run, tmp_path, cluster):
    held_out = [word.replace("data.", "evaluation.") for word in small_run if word.startswith("data.path=")]
    words = [*small_run, "rollout.engine=hf", "rollout.num_threads=1", "trainer.num_threads=1", *held_out]
    words += [
        "trainer.max_steps=5",
        "evaluation.every_steps=2",
        "evaluation.num_problems=4",
        "evaluation.num_samples=4",
    ]
    words += ["evaluation.overlap=allow", "checkpoint.every_steps=0", f"output_dir={tmp_path}"]

    def measured(name: str, *more: str) -> tuple[dict[int, float], dict[int, str]]:
        directory = run(load_config([*words, f"name={name}", *more]), quiet=True).directory
        assert not {event["kind"] for event in events_of(directory)} & {"fault", "reconnected", "evaluation_lost"}
        lines = metrics_of(directory)
        accuracies = [{key: value for key, value in line.items() if key.startswith("accuracy/")} for line in lines]
        scores = {line["step"]: found for line, found in zip(lines, accuracies, strict=True) if found}
        return scores, {line["step"]: line["hash/weights"] for line in lines if "hash/weights" in line}

    assert measured("own", "evaluation.num_workers=1") == measured("blocking")
