"""What a person reads when a run has ended before its end."""

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.charts.cards import elapsed
from penstock.orchestrator.observability.reporting.closing import print_summary, print_unfinished
from penstock.orchestrator.run_directory.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("every_steps", "way_on"),
    [(2, "name=run resume=auto goes on from the newest checkpoint"), (0, "checkpoint.every_steps=N takes them")],
)
def test_a_run_that_failed_says_where_it_lies_and_how_it_goes_on(tmp_path: Path, every_steps: int, way_on: str) -> None:
    words = [f"output_dir={tmp_path}", "name=run", f"checkpoint.every_steps={every_steps}"]
    config = load_config(words)
    run = RunDirectory.create(config)
    text = io.StringIO()
    print_unfinished(config, run, Console(file=text, width=60))
    lines = text.getvalue().strip().splitlines()
    assert [line.split()[0] for line in lines] == ["run", "report", "go"]
    assert lines[0].endswith("/run")
    assert lines[1].endswith("/run/report.html")
    assert way_on in lines[2]


def test_a_run_that_has_ended_and_cannot_be_read_says_so(tmp_path: Path) -> None:
    text = io.StringIO()
    print_summary(tmp_path / "away", load_config([]), console=Console(file=text, width=200))
    assert "The run has ended, and its directory cannot be read: " in text.getvalue()


def test_a_run_at_a_url_is_told_by_its_url_and_its_working_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config([f"output_dir=file://{tmp_path}/bucket", "name=run"])
    run = RunDirectory.create(config)
    run.model.mkdir()
    summary, unfinished = io.StringIO(), io.StringIO()
    print_summary(run.path, config, console=Console(file=summary, width=200))
    print_unfinished(config, run, Console(file=unfinished, width=200))
    url = f"file://{tmp_path}/bucket/run"
    for line in (f"report    {url}/report.html", f"model     {url}/model", f"all files {url}", f"also in   {run.path}"):
        assert line in summary.getvalue().splitlines()
    assert f"run       {url}" in unfinished.getvalue().splitlines()


def test_the_commands_to_try_next_have_the_words_of_the_users_own(tmp_path: Path) -> None:
    words = ["recipe=arithmetic", "trainer.max_steps=5", "name=demo", f"output_dir={tmp_path}", "resume=auto"]
    words += ["data.system_prompt=Be brief, please", "data.options.max_terms=2"]
    config = load_config(words)
    run = RunDirectory.create(config)
    text = io.StringIO()
    print_summary(run.path, config, words, Console(file=text, width=60))
    commands = [line.strip() for line in text.getvalue().splitlines() if line.startswith("  penstock ")]
    own = f"recipe=arithmetic trainer.max_steps=5 output_dir={tmp_path} 'data.system_prompt=Be brief, please'"
    assert commands[0] == f"penstock run {own} data.options.max_terms=2 max_staleness=1"
    assert commands[1] == f"penstock run {own} data.options.max_terms=3"
    assert commands[-1] == f"penstock validate {own} data.options.max_terms=2"
    for command in commands:
        load_config(shlex.split(command)[2:])


@pytest.mark.parametrize("output", ["", "output_dir={kept}"])
def test_what_to_try_after_a_job_names_no_directory_that_ray_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    copy = tmp_path / "ray" / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    words = ["recipe=arithmetic", *filter(None, [output.format(kept=tmp_path / "kept")])]
    config = load_config([*words, "name=run"])
    run, text = RunDirectory.create(config), io.StringIO()
    run.model.mkdir()
    print_summary(run.path, config, words, Console(file=text, width=200))
    told, _, tried = text.getvalue().partition("Try next")
    submit = "ray job submit --working-dir . -- "
    commands = [line.strip() for line in tried.splitlines() if line.startswith("  ray ")]
    assert [command.startswith(f"{submit}penstock ") for command in commands] == [True] * 5
    assert "/ray/" not in tried
    assert (f"model.path={run.model}" in tried) == bool(output)
    assert ("Ray deletes this copy" in told) == (not output)
    assert f"all files {run.path}" in told
    for command in commands:
        load_config(shlex.split(command.removeprefix(submit))[2:])


def test_an_error_with_brackets_is_told_as_it_is(tmp_path: Path) -> None:
    config = load_config([f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=1"])
    run, text = RunDirectory.create(config), io.StringIO()
    run.log_metrics({"step": 1, "checkpoint/failed": 1.0})
    run.event("checkpoint_failed", step=1, error="CheckpointError", message="rank 1: [/src/pair.cc:537] closed")
    print_summary(run.path, config, console=Console(file=text, width=200))
    assert "[/src/pair.cc:537] closed" in text.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(None, "0:00"), (7.9, "0:07"), (750, "12:30"), (3723, "1:02:03")])
def test_seconds_are_told_as_a_clock_does(seconds: float | None, text: str) -> None:
    assert elapsed(seconds) == text
