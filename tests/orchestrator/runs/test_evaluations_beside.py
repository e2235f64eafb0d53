"""Whole runs that train on while a version is evaluated: what is measured is the version that the line names."""

import asyncio
import json

import pytest
import ray

from penstock.conf.errors import WeightError
from penstock.orchestrator.checkpointing.export import export_checkpoint
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control.evaluation import Evaluator
from penstock.orchestrator.control.evaluations import Measuring
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


def scores_of(directory):
    """What was measured after each step."""
    found = {}
    for line in metrics_of(directory):
        if "accuracy/heldout" in line:
            assert line["step"] not in found
            found[line["step"]] = {key: value for key, value in line.items() if key.startswith("accuracy/")}
    return found


@pytest.fixture
def measured_words(small_run, tmp_path, cluster):
    held_out = [word.replace("data.", "evaluation.") for word in small_run if word.startswith("data.path=")]
    numbers = ["every_steps=2", "num_problems=16", "num_samples=8", "overlap=allow", "right_at=0.1"]
    return [
        *small_run, "rollout.engine=hf", *held_out, *(f"evaluation.{word}" for word in numbers),
        f"output_dir={tmp_path}",
    ]  # fmt: skip


@pytest.fixture
def killed(monkeypatch):
    """Names of the engines that were killed: those of the first evaluation beside training, as it began."""
    names, measure = [], Evaluator.measure

    async def killing(self, fleet):
        measuring = asyncio.ensure_future(measure(self, fleet))
        if isinstance(fleet, Measuring) and not names:
            for name, handle in await fleet.present("rollout"):
                names.append(name)
                ray.kill(handle)
        return await measuring

    monkeypatch.setattr(Evaluator, "measure", killing)
    return names


@pytest.mark.real
def test_evaluations_whose_own_engine_dies_find_the_same_bits(measured_words, killed, cluster):
    """The next one loads the publication that was kept: there is no checkpoint."""
    words = [*measured_words, "trainer.max_steps=7", "checkpoint.every_steps=0"]
    died = run(load_config([*words, "name=died", "evaluation.num_workers=1"]), quiet=True).directory
    assert killed == ["Rollout-1"]
    assert [event["member"] for event in events_of(died) if event["kind"] == "recovered"] == ["Rollout-1"]
    assert not [event["message"] for event in events_of(died) if event["kind"] == "evaluation_lost"]
    found = scores_of(died)
    assert len({score["accuracy/heldout_avg@8"] for score in found.values()}) >= 4  # a wrong version would show
    assert found == scores_of(run(load_config([*words, "name=blocking"]), quiet=True).directory)


async def gone(self, version, members):
    raise WeightError(f"version {version} is gone")


@pytest.mark.real
@pytest.mark.parametrize("is_kept", [True, False])
def test_another_engine_measures_the_version_of_a_lent_one_that_dies(
    is_kept, measured_words, killed, tmp_path, cluster, monkeypatch
):
    """From the publication that was kept, or from the checkpoint: the score is that of the exported model."""
    if not is_kept:
        monkeypatch.setattr(WeightSync, "load_kept", gone)
    words = [*measured_words, "rollout.num_workers=2", "max_staleness=2", "trainer.max_steps=9"]
    died = run(load_config([*words, "name=died", "checkpoint.keep_best=9", "checkpoint.every_steps=9"]), quiet=True)
    assert len(killed) == 1
    failures = ("evaluation_lost", "checkpoint_failed")
    assert not [event["message"] for event in events_of(died.directory) if event["kind"] in failures]
    found = scores_of(died.directory)
    assert sorted(found) == [0, 2, 4, 6, 8, 9]
    assert len({score["accuracy/heldout_avg@8"] for score in found.values()}) >= 4  # a wrong version would show
    export_checkpoint(f"{died.directory}/checkpoints/global_step_2", tmp_path / "exported")
    alone = [*measured_words, f"model.path={tmp_path}/exported", "trainer.max_steps=1", "name=alone"]
    assert found[2] == scores_of(run(load_config(alone), quiet=True).directory)[0]
    assert max(line.get("staleness/max", 0) for line in metrics_of(died.directory)) <= 2


@pytest.mark.real
def test_a_run_that_resumes_measures_from_checkpoints_what_was_not_measured(measured_words, tmp_path, cluster):
    words = [
        *measured_words,
        "name=parts",
        "evaluation.num_workers=1",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=9",
    ]
    directory = run(load_config([*words, "trainer.max_steps=5"]), quiet=True).directory
    known, file = scores_of(directory), directory / "metrics.jsonl"
    own = {"evaluation/step": 2}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines if not own.items() <= line.items()))
    assert 2 not in scores_of(directory)  # as if the run had died before
    run(load_config([*words, "trainer.max_steps=7", "resume=auto"]), quiet=True)
    again = scores_of(directory)
    assert again[2] == known[2] != again[4]
    assert sorted(again) == [0, 2, 4, 5, 6, 7]
    assert not [event for event in events_of(directory) if event["kind"] == "evaluation_lost"]
