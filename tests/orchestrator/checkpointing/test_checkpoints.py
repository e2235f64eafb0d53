"""The files of checkpoints: what counts as complete, what is kept, what is refused and by which name."""

import json
from pathlib import Path

import pytest

from penstock.conf.errors import CheckpointError, ConfigError, DamagedCheckpoint, RunInUse
from penstock.conf.faults import CheckpointConfig
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints, best_checkpoint, open_checkpoint
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recovery.resume import finished_run, open_run, rewind
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.prompts.order import PromptCursor
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.url_files import SavedFile, saved_file


def write(checkpoints: Checkpoints, step: int, *, model: str = "/", run=None, **values) -> Checkpoint:
    """A complete one, with one trainer's file. `run`: what the run has set of its checkpoints."""
    directory = checkpoints.directory(step)
    path = Path(directory.removeprefix("file://"))
    (path / "trainer").mkdir(parents=True)
    (path / "trainer" / "rank_0.bin").write_bytes(b"weights" * step)
    files = [saved_file(path / "trainer" / "rank_0.bin")]
    start = PromptStart(PromptCursor(1, step), 4 * step)
    config = {"algorithm": {"name": "grpo"}, "checkpoint": run or {}}
    made = Checkpoint(directory, step, start, model, {"teacher": "/t"}, files, config, **values)
    checkpoints.seal(made)
    return made


@pytest.fixture(params=["", "file://"])
def checkpoints(request, tmp_path) -> Checkpoints:
    return Checkpoints(f"{request.param}{tmp_path}/checkpoints", CheckpointConfig(keep_last=2))


def test_what_is_written_is_what_is_opened(checkpoints):
    made = write(checkpoints, 3, head="scores")
    assert open_checkpoint(made.directory) == made == checkpoints.newest()


def test_one_without_its_marker_does_not_exist(checkpoints, tmp_path):
    write(checkpoints, 1)
    write(checkpoints, 2)
    (tmp_path / "checkpoints" / "global_step_2" / "COMPLETE").unlink()
    assert checkpoints.steps() == [1]
    with pytest.raises(CheckpointError, match=r"is no checkpoint.*COMPLETE.*The one before is .*global_step_1\."):
        open_checkpoint(checkpoints.directory(2))
    checkpoints.sweep()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_one_whose_marker_cannot_be_looked_at_is_not_swept(checkpoints, tmp_path):
    write(checkpoints, 1)
    marker = tmp_path / "checkpoints" / "global_step_1" / "COMPLETE"
    marker.unlink()
    marker.symlink_to(marker)
    with pytest.raises(CheckpointError, match=r"COMPLETE: cannot be read: .*symbolic links"):
        checkpoints.sweep()
    assert (marker.parent / "manifest.json").exists()


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is no checkpoint"):
        open_checkpoint(f"{tmp_path}/file")


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("trainer/rank_0.bin", None, "is missing as this machine sees it"),
        ("trainer/rank_0.bin", b"weight", "has 6 bytes instead of 7 as"),
        ("trainer/rank_1.bin", b"weighty", "is damaged: its checksum is"),
        ("store/snapshot-1/groups.arrow", None, "is missing as this machine sees it"),
        ("store/snapshot-1/groups.arrow", b"group", "is damaged: its checksum is"),
    ],
)
def test_a_checkpoint_that_lacks_a_part_is_not_sealed(checkpoints, tmp_path, name, fault, message):
    place = tmp_path / "checkpoints" / "global_step_4"
    parts = {f"trainer/rank_{rank}.bin": b"weights" for rank in range(2)} | {"store/snapshot-1/groups.arrow": b"GROUP"}
    for part, data in parts.items():
        (place / part).parent.mkdir(parents=True, exist_ok=True)
        (place / part).write_bytes(data)
    files = [SavedFile.of_bytes(f"rank_{rank}.bin", b"weights") for rank in range(2)]
    snapshot = [SavedFile.of_bytes("snapshot-1/groups.arrow", b"GROUP")]
    made = Checkpoint(checkpoints.directory(4), 4, PromptStart(PromptCursor(1, 4), 16), "/", {}, files)
    (place / name).unlink() if fault is None else (place / name).write_bytes(fault)
    with pytest.raises(CheckpointError, match=rf"{name} {message}.*a directory that all nodes share"):
        checkpoints.seal(made, snapshot, brought=["rank_1.bin"])
    assert checkpoints.steps() == []
    (place / name).write_bytes(parts[name])
    checkpoints.seal(made, snapshot, brought=["rank_1.bin"])
    assert checkpoints.steps() == [4]


def test_the_newest_stay_and_those_that_the_number_divides(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(keep_last=2, keep_every_steps=4))
    for step in (2, 4, 6, 8, 10):
        write(checkpoints, step)
    assert checkpoints.prune() == [2, 6]
    assert checkpoints.steps() == [4, 8, 10]


def kept(tmp_path, **config):
    """Checkpoints of steps 1 to 5, and what evaluation has measured of some of them."""
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(keep_last=1, **config))
    for step in (1, 2, 3, 4, 5):
        write(checkpoints, step, run=config)
    for step, accuracy in {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.7}.items():
        checkpoints.add_scores(step, {"accuracy/heldout": accuracy, "accuracy/hard": None if step == 1 else -accuracy})
    return checkpoints


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, [5]),
        ({"keep_best": 1}, [2, 5]),
        ({"keep_best": 3}, [2, 3, 4, 5]),
        ({"keep_best": 1, "best_mode": "min"}, [1, 5]),
        ({"keep_best": 1, "best_metric": "accuracy/hard"}, [4, 5]),
        ({"keep_best": 1, "best_metric": "accuracy/none"}, [5]),
        ({"keep_best": 1, "keep_every_steps": 3}, [2, 3, 5]),
    ],
    ids=str,
)
def test_the_best_stay_too_and_of_equal_ones_the_earlier(tmp_path, config, steps):
    kept(tmp_path, **config).prune()
    assert Checkpoints(str(tmp_path), CheckpointConfig()).steps() == steps


def test_a_checkpoint_stays_while_its_score_is_awaited_and_goes_if_none_comes(tmp_path):
    checkpoints = kept(tmp_path, keep_best=1)
    write(checkpoints, 6)
    assert checkpoints.prune(awaited={1, 5}) == [3, 4]
    assert checkpoints.steps() == [1, 2, 5, 6]
    assert checkpoints.prune() == [1, 5]


def test_scores_are_read_again_by_the_next_command(tmp_path):
    kept(tmp_path)
    again = Checkpoints(f"file://{tmp_path}", CheckpointConfig(keep_best=1, keep_last=1))
    assert again.scores() == {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.7}
    again.unseal(2)
    again.clear(2)
    write(again, 2)
    assert again.scores() == {1: 0.5, 3: 0.9, 4: 0.7}, "a step that was made again has the score of the one before"


def test_the_best_is_found_by_the_runs_own_metric_and_says_its_score(tmp_path):
    kept(tmp_path / "run" / "checkpoints", best_metric="accuracy/hard", best_mode="max")
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        found, told = best_checkpoint(str(place))
        assert found.step == 4
        assert told == "step 4: accuracy/hard=-0.7, the best of 3 checkpoint(s) with a score"


def test_where_there_is_no_best_what_to_do_is_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"--best: .* has no checkpoints to choose from.*checkpoint\.every_steps"):
        best_checkpoint(str(tmp_path))
    write(Checkpoints(f"{tmp_path}/checkpoints", CheckpointConfig()), 4)
    message = r"--best: no checkpoint in .*/checkpoints \(steps 4\) has a score, accuracy/heldout\. Set evaluation"
    with pytest.raises(CheckpointError, match=message):
        best_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"is one checkpoint.*--best chooses among those of a run"):
        best_checkpoint(f"{tmp_path}/checkpoints/global_step_4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.every_steps=0"], "nothing is evaluated.*Set evaluation.every_steps"),
        (["evaluation.every_steps=5", "checkpoint.every_steps=0"], "takes no checkpoints. Set it to 5 or more"),
        (
            ["evaluation.every_steps=5", "checkpoint.best_metric=accuracy/heldout_avg@4"],
            "evaluation measures accuracy/heldout. Name one",
        ),
        (
            ["evaluation.every_steps=5", "checkpoint.best_metric=x", "evaluation.num_samples=2",
             "evaluation.sets={hard: {path: hard.jsonl}}"],
            "accuracy/heldout_pass@2, accuracy/hard, accuracy/hard_avg@2",
        ),
        (["evaluation.every_steps=5", "checkpoint.best_mode=most"], "checkpoint.best_mode=most: unknown"),
    ],
)  # fmt: skip
def test_keeping_the_best_without_scores_is_refused(tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        run_words(tmp_path, "evaluation.path=y.jsonl", "checkpoint.keep_best=1", *words)


def test_a_runs_directory_means_its_newest_checkpoint(tmp_path):
    checkpoints = Checkpoints(f"{tmp_path}/run/checkpoints", CheckpointConfig())
    for step in (9, 10):
        write(checkpoints, step)
    for place in (f"{tmp_path}/run", f"{tmp_path}/run/checkpoints/", f"{tmp_path}/run/checkpoints/global_step_10"):
        assert open_checkpoint(place).step == 10


@pytest.mark.parametrize("damage", ["missing", "truncated", "manifest"])
def test_a_damaged_one_is_refused_by_its_files_name_and_the_one_before_offered(tmp_path, damage):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig())
    write(checkpoints, 1)
    write(checkpoints, 2)
    file = tmp_path / "global_step_2" / "trainer" / "rank_0.bin"
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(b"w")
    else:
        file = tmp_path / "global_step_2" / "manifest.json"
        file.write_text("{")
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(checkpoints.directory(2))
    assert str(file) in str(raised.value)
    assert f"The one before is {tmp_path}/global_step_1." in str(raised.value)


def test_a_step_that_could_not_even_be_begun_is_cleared(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("nowhere", "file"):
        Checkpoints(str(tmp_path / place), CheckpointConfig()).clear(1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_of_another_format_is_refused(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig())
    write(checkpoints, 1)
    manifest = tmp_path / "global_step_1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(CheckpointError, match="its format is 1, and this Penstock reads 2"):
        open_checkpoint(checkpoints.directory(1))


def run_words(tmp_path, *more):
    return load_config([f"output_dir={tmp_path}", "model=tiny", "data.path=x.jsonl", *more])


def test_resume_auto_without_such_a_run_is_a_new_run(tmp_path):
    directory, resumed = open_run(run_words(tmp_path, "name=new", "resume=auto"))
    assert resumed is None
    assert [event["kind"] for event in directory.read_events()] == ["start"]


def test_resume_auto_goes_on_in_the_runs_directory_and_drops_repeated_lines(tmp_path):
    directory, _ = open_run(run_words(tmp_path, "name=again"))
    for step in range(4):
        directory.log_metrics({"step": step})
    directory.close()
    write(Checkpoints(str(directory.checkpoints), CheckpointConfig()), 2)
    (directory.checkpoints / "global_step_3").mkdir()
    again, resumed = open_run(run_words(tmp_path, "name=again", "resume=auto"))
    assert resumed is not None
    assert resumed.step == 2
    assert again.path == directory.path
    assert [line["step"] for line in again.read_metrics()] == [0, 1, 2]
    assert [event["kind"] for event in again.read_events()] == ["start", "resume"]
    assert not (directory.checkpoints / "global_step_3").exists()


def checkpointed(tmp_path, *steps):
    """A run of the name "hurt" that was there, and its checkpoints."""
    directory, _ = open_run(run_words(tmp_path, "name=hurt"))
    for step in range(max(steps) + 1):
        directory.log_metrics({"step": step})
    directory.close()
    checkpoints = Checkpoints(str(directory.checkpoints), CheckpointConfig())
    for step in steps:
        write(checkpoints, step)
    return directory.checkpoints


def test_damaged_ones_are_put_aside_and_the_one_before_them_is_taken(tmp_path):
    place = checkpointed(tmp_path, 1, 2, 3)
    (place / "damaged_global_step_3").mkdir()  # by an earlier accident
    (place / "global_step_2" / "manifest.json").unlink()
    (place / "global_step_3" / "trainer" / "rank_0.bin").write_bytes(b"w")
    told = []
    again, resumed = open_run(run_words(tmp_path, "name=hurt", "resume=auto"))
    again.failed_writes.set_printer(told.append)
    assert resumed is not None
    assert resumed.step == 1
    assert [line["step"] for line in again.read_metrics()] == [0, 1]
    names = ["damaged_global_step_2", "damaged_global_step_3", "damaged_global_step_3_2", "global_step_1"]
    assert sorted(path.name for path in place.iterdir()) == names
    assert (place / "damaged_global_step_3_2" / "trainer" / "rank_0.bin").read_bytes() == b"w"
    events = [(event["kind"], event["step"]) for event in again.read_events()[1:]]
    assert events == [("checkpoint_damaged", 3), ("checkpoint_damaged", 2), ("resume", 1)]
    assert "the checkpoint of step 3 is damaged and was put aside as" in told[0]
    assert "rank_0.bin has 1 bytes instead of 21" in told[0]
    write(Checkpoints(str(place), CheckpointConfig()), 3)  # the step comes again


def test_where_none_is_whole_the_newest_is_told_and_all_stay(tmp_path):
    place = checkpointed(tmp_path, 1, 2)
    for step in (1, 2):
        (place / f"global_step_{step}" / "trainer" / "rank_0.bin").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match=r"global_step_2/trainer/rank_0\.bin has 0 bytes"):
        open_run(run_words(tmp_path, "name=hurt", "resume=auto"))
    assert sorted(path.name for path in place.iterdir()) == ["global_step_1", "global_step_2"]


def test_a_checkpoint_that_cannot_be_read_for_now_is_not_put_aside(tmp_path):
    place = checkpointed(tmp_path, 1, 2)
    manifest = place / "global_step_2" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_run(run_words(tmp_path, "name=hurt", "resume=auto"))
    assert sorted(path.name for path in place.iterdir()) == ["global_step_1", "global_step_2"]


def test_resume_never_says_how_to_go_on(tmp_path):
    directory, _ = open_run(run_words(tmp_path, "name=twice"))
    directory.log_metrics({"step": 1})
    directory.close()
    with pytest.raises(ConfigError, match="Add resume=auto"):
        open_run(run_words(tmp_path, "name=twice"))


def test_a_run_that_goes_on_leaves_the_checkpoint_that_a_live_one_is_writing(tmp_path):
    live, _ = open_run(run_words(tmp_path, "name=live"))
    live.log_metrics({"step": 7})
    unfinished = live.checkpoints / "global_step_7"
    unfinished.mkdir(parents=True)
    with pytest.raises(RunInUse, match=r"name=live: .*/live is in use by process \d+ of .*, started 20"):
        open_run(run_words(tmp_path, "name=live", "resume=auto"))
    assert unfinished.exists()
    assert live.read_metrics() == [{"step": 7}]
    live.close()
    open_run(run_words(tmp_path, "name=live", "resume=auto"))[0].close()
    assert not unfinished.exists()


def test_two_runs_do_not_share_a_directory_of_checkpoints(tmp_path):
    place = f"checkpoint.directory={tmp_path}/shared"
    one, _ = open_run(run_words(tmp_path, "name=one", place))
    with pytest.raises(RunInUse, match=r"checkpoint\.directory: .*/shared is in use by process"):
        open_run(run_words(tmp_path, "name=two", place))
    one.close()
    open_run(run_words(tmp_path, "name=two", place))[0].close()


def test_the_first_checkpoint_tells_of_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    directory, _ = open_run(run_words(tmp_path, "name=run", f"checkpoint.directory={tmp_path}/file/below"))
    directory.close()


def ended(tmp_path, steps, *events):
    """A run that was there, with its model."""
    directory, _ = open_run(run_words(tmp_path, "name=past"))
    directory.log_metrics({"step": steps})
    for kind, values in events or (("end", {"steps": steps}),):
        directory.event(kind, **values)
    directory.model.mkdir()
    directory.close()


@pytest.mark.parametrize(
    ("words", "is_finished"),
    [
        (["trainer.max_steps=4", "resume=auto"], True),
        (["trainer.max_steps=3", "resume=auto"], True),
        (["trainer.max_steps=5", "resume=auto"], False),
        (["trainer.max_steps=4"], False),
    ],
)
def test_nothing_is_left_of_a_run_that_has_made_all_steps(tmp_path, words, is_finished):
    ended(tmp_path, 4)
    assert (finished_run(run_words(tmp_path, "name=past", *words)) is not None) == is_finished


def test_nothing_is_left_of_a_run_that_reached_its_goal_unless_that_changes(tmp_path):
    ended(tmp_path, 4, ("stopped_early", {"step": 4, "accuracy": 0.9, "goal": 0.8}), ("end", {"steps": 4}))
    words = ["name=past", "trainer.max_steps=9", "resume=auto"]
    assert finished_run(run_words(tmp_path, *words, "evaluation.stop_at_accuracy=0.8")) is not None
    assert finished_run(run_words(tmp_path, *words, "evaluation.stop_at_accuracy=0.95")) is None
    assert finished_run(run_words(tmp_path, *words)) is None


def test_a_run_that_failed_after_its_last_update_or_has_no_model_is_unfinished(tmp_path):
    words = ["name=past", "trainer.max_steps=4", "resume=auto"]
    ended(tmp_path, 4, ("end", {"steps": 4}), ("resume", {}), ("failed", {}))
    assert finished_run(run_words(tmp_path, *words)) is None
    directory, _ = open_run(run_words(tmp_path, *words))
    directory.event("end", steps=4)
    directory.close()
    assert finished_run(run_words(tmp_path, *words)) is not None
    directory.model.rmdir()
    assert finished_run(run_words(tmp_path, *words)) is None
    assert finished_run(run_words(tmp_path, *words, "tracking.export_model=false")) is not None


def test_resume_auto_wants_a_name(tmp_path):
    with pytest.raises(ConfigError, match="Add name=RUN"):
        run_words(tmp_path, "resume=auto")


def test_another_runs_checkpoint_starts_a_new_run(tmp_path):
    write(Checkpoints(f"{tmp_path}/old/checkpoints", CheckpointConfig()), 5)
    directory, resumed = open_run(run_words(tmp_path, "name=fork", f"resume={tmp_path}/old"))
    assert resumed is not None
    assert resumed.step == 5
    assert directory.path == tmp_path / "fork"


def test_what_does_not_fit_is_told_before_anything_starts(tmp_path):
    write(Checkpoints(f"{tmp_path}/old/checkpoints", CheckpointConfig()), 5)
    place = f"resume={tmp_path}/old"
    with pytest.raises(ConfigError, match=r"algorithm=sft.*is of grpo.*penstock export"):
        open_run(run_words(tmp_path, "name=a", place, "algorithm=sft"))
    write(Checkpoints(f"{tmp_path}/gone/checkpoints", CheckpointConfig()), 5, model=f"{tmp_path}/nowhere")
    with pytest.raises(CheckpointError, match="nowhere, which is gone"):
        open_run(run_words(tmp_path, "name=c", f"resume={tmp_path}/gone"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone", "old"], "a directory was made"


def test_the_manifest_is_plain_json(tmp_path):
    made = write(Checkpoints(str(tmp_path), CheckpointConfig()), 7)
    values = json.loads((tmp_path / "global_step_7" / "manifest.json").read_text())
    assert values["step"] == 7
    cursor = {"epoch": 1, "position": 7}
    assert values["prompts"] == {
        "cursor": cursor, "first_group": 28, "curriculum": None, "data": None, "num_rows": None,
    }  # fmt: skip
    assert values["files"][0] == {"name": "rank_0.bin", "num_bytes": 49, "checksum": made.files[0].checksum}


def test_a_place_that_does_not_answer_is_named(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/loop: cannot be read: .*symbolic links"):
        Checkpoints(f"{tmp_path}/loop", CheckpointConfig()).newest()


def test_a_command_that_was_thought_dead_sets_nothing_back_that_is_anothers(tmp_path):
    """The command comes back, misses its actors, and would return to its checkpoint."""
    config = load_config([f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=1"])
    directory = RunDirectory.create(config)
    for step in (1, 2):
        directory.log_metrics({"step": step})
    unsealed = directory.checkpoints / "global_step_2"
    unsealed.mkdir(parents=True)
    other = {"pid": 1, "host": "elsewhere", "user": "me", "started": "2026-01-01T00:00:00Z"}
    (directory.path / "run.lock").write_text(json.dumps(other))
    with pytest.raises(RunInUse, match="that process goes on with the run"):
        rewind(directory, config)
    assert [line["step"] for line in directory.read_metrics()] == [1, 2]
    assert unsealed.is_dir()
    directory.close()
