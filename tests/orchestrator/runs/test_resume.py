"""Runs that are killed at the worst moment and go on: the same weights, bit for bit, as if nothing had happened."""

import json
import shutil
import time
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.cli.main import main
from penstock.conf.errors import CheckpointError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from tests.amounts import IS_MANY
from tests.orchestrator.victim import Victim
from tests.run_files import metrics_of

pytestmark = pytest.mark.real

NUM_KILLS = 20 if IS_MANY else 4
MAX_STEPS = 4 * NUM_KILLS
"""More than are made between two kills."""
ONE_THREAD = ["rollout.num_threads=1", "trainer.num_threads=1"]
"""Sums in one order."""


@pytest.fixture
def words(small_run, tmp_path, cluster):
    return [*small_run, *ONE_THREAD, "rollout.engine=hf", f"output_dir={tmp_path}"]


def steps_of(directory):
    return [line["step"] for line in metrics_of(directory)]


def cut_last_line(file):
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:-1]))


def assert_same_model(one, other):
    one, other = (load_file(Path(directory) / "model" / "model.safetensors") for directory in (one, other))
    assert one.keys() == other.keys()
    assert not [name for name in one if not one[name].equal(other[name])]


@pytest.mark.promise("4 resumed", "The run dies")
def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(words, tmp_path):
    """A run goes on in its own directory, from another run's checkpoint, with two ranks, and as a model for others."""
    words = [*words, "checkpoint.every_steps=2"]
    whole = run(load_config([*words, "name=whole", "trainer.max_steps=4"]), quiet=True)
    run(load_config([*words, "name=parts", "trainer.max_steps=2"]), quiet=True)
    shutil.copytree(tmp_path / "parts", tmp_path / "copy")
    cut_last_line(tmp_path / "parts" / "metrics.jsonl")  # as if it was killed before it could write it
    result = run(load_config([*words, "name=parts", "trainer.max_steps=4", "resume=auto"]), quiet=True)
    assert steps_of(result.directory) == [1, 2, 3, 4]
    expected, found = (
        json.loads((one.directory / "metrics.jsonl").read_text().splitlines()[1]) for one in (whole, result)
    )
    assert found == {name: expected[name] for name in found}
    assert found.keys() >= {"step", "reward/mean", "actor/grad_norm"}
    assert_same_model(result.directory, whole.directory)
    places = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert places == ["global_step_2", "global_step_4"]

    ranks = [*words, "name=ranks", "trainer.max_steps=3", "trainer.num_ranks=2", f"resume={tmp_path}/copy"]
    assert steps_of(run(load_config(ranks), quiet=True).directory) == [3]

    assert main(["export", str(tmp_path / "parts" / "checkpoints" / "global_step_4"), str(tmp_path / "exported")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert all(tensor.equal(exported[name]) for name, tensor in load_file(whole.model / "model.safetensors").items())
    assert main(["export", str(tmp_path / "parts"), str(tmp_path / "exported")]) == 2


def test_a_run_that_goes_on_knows_its_best_checkpoint_which_is_exported(words, tmp_path, capsys):
    words = [*words, "name=best", "checkpoint.keep_best=1", "checkpoint.keep_last=1"]
    words += [word.replace("data.", "evaluation.") for word in words if word.startswith("data.path=")]
    words += [
        "evaluation.every_steps=1",
        "evaluation.num_problems=4",
        "evaluation.overlap=allow",
        "evaluation.right_at=0",
    ]
    run(load_config([*words, "trainer.max_steps=2"]), quiet=True)
    (tmp_path / "best" / "checkpoints" / "global_step_2" / "scores.json").unlink()  # as if killed during the evaluation
    result = run(load_config([*words, "trainer.max_steps=4", "resume=auto"]), quiet=True)
    events = [json.loads(line) for line in (result.directory / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "checkpoint_scored"] == [1, 2, 2, 3, 4]
    assert [line["accuracy/heldout"] for line in metrics_of(result.directory)] == [1.0] * 6
    assert sorted(path.name for path in (result.directory / "checkpoints").iterdir()) == [
        "global_step_1",
        "global_step_4",
    ]
    assert main(["export", str(result.directory), str(tmp_path / "exported"), "--best"]) == 0
    assert capsys.readouterr().out.startswith("step 1: accuracy/heldout=1, the best of 2 checkpoint(s) with a score\n")
    last, best = load_file(result.model / "model.safetensors"), load_file(tmp_path / "exported" / "model.safetensors")
    assert not all(tensor.equal(best[name]) for name, tensor in last.items()), "the last model was exported"


@pytest.mark.parametrize("part", ["trainer/rank_0.bin", "store"])
def test_a_checkpoint_found_damaged_is_put_aside_and_the_one_before_taken(words, tmp_path, part):
    """The sizes of the files are right: a flipped bit shows when ranks or the store read it. The numbers are those of
    the checkpoint before."""
    words = [*words, "checkpoint.every_steps=1", "name=hurt"]
    before = metrics_of(run(load_config([*words, "trainer.max_steps=2"]), quiet=True).directory)
    place = tmp_path / "hurt" / "checkpoints"
    file = place / "global_step_2" / part
    file = next(file.rglob("*.arrow")) if file.is_dir() else file
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    again = metrics_of(run(load_config([*words, "trainer.max_steps=3", "resume=auto"]), quiet=True).directory)
    assert [line["step"] for line in again] == [1, 2, 3]
    assert again[1]["reward/mean"] == before[1]["reward/mean"]
    assert again[1]["actor/grad_norm"] == before[1]["actor/grad_norm"]
    names = sorted(path.name for path in place.iterdir())  # two are kept
    assert names == ["damaged_global_step_2", "global_step_2", "global_step_3"]


@pytest.mark.promise("3")
def test_finished_work_of_an_asynchronous_run_is_kept(words, tmp_path):
    """Groups that were sampled before the checkpoint are trained after it, within the staleness bound."""
    words = [*words, "checkpoint.every_steps=2", "max_staleness=2", "name=ahead"]
    run(load_config([*words, "trainer.max_steps=3"]), quiet=True)
    shutil.rmtree(tmp_path / "ahead" / "checkpoints" / "global_step_3")
    result = run(load_config([*words, "trainer.max_steps=5", "resume=auto"]), quiet=True)
    lines = metrics_of(result.directory)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["staleness/max"] for line in lines) <= 2
    assert not any(line.get("dropped/stale") for line in lines)


@pytest.mark.promise("8")
def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(words, tmp_path):
    (tmp_path / "file").write_text("")
    words = [*words, "checkpoint.every_steps=1", "trainer.max_steps=2", "name=full"]
    with pytest.raises(CheckpointError, match="file/below"):  # of the last step, which nothing could make good
        run(load_config([*words, f"checkpoint.directory={tmp_path}/file/below"]), quiet=True)
    assert steps_of(tmp_path / "full") == [1, 2]
    events = [json.loads(line)["kind"] for line in (tmp_path / "full" / "events.jsonl").read_text().splitlines()]
    lines = (tmp_path / "full" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["checkpoint/failed"] for line in lines][-1] in (1.0, 2.0)
    assert (events[0], events[-1]) == ("start", "failed")
    assert sorted(events[1:-1]) == ["checkpoint_failed", "checkpoint_failed", "model_exported", "placed", "serving"]


@pytest.fixture
def victim(warm_python, driver_environment):
    return lambda words: Victim(words, warm_python, driver_environment)


def test_kills_at_random_moments_change_no_bit(words, tmp_path, victim):
    """Moments: while the run starts, between steps, while a checkpoint is written, just after one. Nothing lives on."""
    words = [*words, "checkpoint.every_steps=1", f"trainer.max_steps={MAX_STEPS}", "resume=auto", "faults.lease_s=0"]
    victim([*words, "name=whole"]).finish()
    killed, random = tmp_path / "killed", Random(0)

    def lines():
        file = killed / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def checkpoints(complete):
        found = (killed / "checkpoints").glob("global_step_*")
        return {path.name for path in found if (path / "COMPLETE").exists() == complete}

    moments = []
    for number in range(NUM_KILLS):
        run = victim([*words, "name=killed"])
        before, sealed, started = lines(), checkpoints(complete=True), time.monotonic()
        if number % 4 == 0:
            later = started + random.uniform(0.0, 4.0)
            run.wait_until(lambda before=before, later=later: time.monotonic() > later or lines() > before)
        elif number % 4 == 1:
            run.wait_until(lambda before=before: lines() > before)
            time.sleep(random.uniform(0.0, 0.3))
        elif number % 4 == 2:
            run.wait_until(lambda: checkpoints(complete=False))
            time.sleep(random.uniform(0.0, 0.05))
        else:
            run.wait_until(lambda sealed=sealed: checkpoints(complete=True) - sealed)
            time.sleep(random.uniform(0.0, 0.3))
        assert run.process.poll() is None, run.process.communicate()[0][-3000:]
        run.kill()
        moments.append((number % 4, lines(), len(checkpoints(complete=False))))
    victim([*words, "name=killed"]).finish()
    assert steps_of(killed) == list(range(1, MAX_STEPS + 1))
    assert any(unfinished for _, _, unfinished in moments), f"never in the middle of a checkpoint: {moments}"
    assert_same_model(killed, tmp_path / "whole")
