"""The commands and their exit codes."""

import asyncio
import importlib
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main as cli
from penstock.cli.main import make_parser
from penstock.conf.errors import ConfigError, DataError, PenstockError, WorkerDied
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.signals import ENDING


def run_with(monkeypatch: pytest.MonkeyPatch, function: Any, *words: str) -> int:
    """`penstock run` with another `run`, so that nothing starts."""
    import penstock.orchestrator.run as run_module

    handlers = {number: signal.getsignal(number) for number in ENDING}
    monkeypatch.setattr(run_module, "run", function)
    try:
        return cli.main(["run", *(words or ("recipe=arithmetic",))])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def raising(error: BaseException) -> Any:
    def run(config: object) -> None:
        raise error

    return run


def test_help_and_version_and_recipes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "penstock run recipe=arithmetic" in capsys.readouterr().out
    assert cli.main(["recipes"]) == 0
    assert "gsm8k" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert "penstock" in capsys.readouterr().out


def test_words_and_options_of_a_command_may_be_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.path=Qwen/Qwen2.5-0.5B", "--lengths", "100", "trainer.groups_per_step=8"]
    assert cli.main(["plan", "recipe=gsm8k", "--cluster", "1x2:h100", *words, "seed=1"]) == 0
    said = capsys.readouterr().out
    assert "penstock run recipe=gsm8k model.path=Qwen/Qwen2.5-0.5B trainer.groups_per_step=8 seed=1 " in said
    for wrong in (["plan", "recipe=gsm8k", "--clustr", "1x2:h100", "seed=1"], ["export", "a", "--dtype", "float32"]):
        with pytest.raises(SystemExit):
            cli.main(wrong)


@pytest.mark.parametrize("command", ["run", "validate", "serve", "sweep"])
def test_a_command_says_what_it_does_before_imports_that_take_time(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("orchestrator.run", "orchestrator.configuration.validate", "serve.command",
                   "orchestrator.configuration.sweep"):  # fmt: skip
        monkeypatch.setitem(sys.modules, f"penstock.{module}", None)  # importing it fails
    monkeypatch.setattr(cli, "heed_end", lambda: None)
    with pytest.raises(ImportError):
        cli.main([command, "recipe=arithmetic"])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_misspelt_command_ends_with_two() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["rnu"])
    assert caught.value.code == 2


@pytest.mark.parametrize("words", [[], ["recipe=nowhere"], ["trainer.max_step=1"], ["arithmetic"]])
def test_a_faulty_configuration_ends_with_two_and_one_message(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("run", "validate"):
        assert cli.main([command, *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("configuration: ")
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (DataError("row 3"), 2, "data"),
        (WorkerDied("Rollout-0"), 1, "error"),
        (ConfigError("x=[y]"), 2, "configuration"),
    ],
)
def test_errors_of_a_run_end_with_the_code_of_their_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: PenstockError, code: int, kind: str
) -> None:
    assert run_with(monkeypatch, raising(error)) == code
    assert capsys.readouterr().err.strip() == f"{kind}: {error}"


def test_an_error_that_crossed_ray_is_told_without_the_remote_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.exceptions import RayTaskError

    crossed = RayTaskError(
        "step", "Traceback (most recent call last): ...", WorkerDied("Rollout-0 died")
    ).as_instanceof_cause()
    assert isinstance(crossed, WorkerDied)
    assert run_with(monkeypatch, raising(crossed)) == 1
    assert capsys.readouterr().err.strip() == "error: Rollout-0 died"


@pytest.mark.parametrize("value", ["1", "true"])
def test_the_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PENSTOCK_TRACEBACK", value)
    with pytest.raises(ConfigError):
        cli.main(["run", "recipe=nowhere"])
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "0")
    assert cli.main(["run", "recipe=nowhere"]) == 2


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, raising(KeyboardInterrupt())) == 130


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["at a terminal", "in the background"])
def started_as(request: pytest.FixtureRequest) -> Iterator[None]:
    """A shell without job control has what it starts by `&` ignore Ctrl-C, which is for who is in the foreground."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("started_as")
@pytest.mark.parametrize("number", ENDING)
def test_sigterm_and_sighup_take_the_way_out_of_ctrl_c(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: object) -> None:
        signal.raise_signal(number)

    assert run_with(monkeypatch, run) == 130


def test_a_command_of_nohup_ignores_the_end_of_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(config: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        raise WorkerDied("later")

    try:
        assert run_with(monkeypatch, run) == 1
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("started_as")
def test_sigterm_lets_what_goes_on_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def steps() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("the run")

    assert run_with(monkeypatch, lambda config: asyncio.run(steps())) == 130
    assert ended == ["the run"]


def test_in_the_background_ctrl_c_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_with(monkeypatch, raising(WorkerDied("x"))) == 1
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_finished_run_ends_with_zero_and_a_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Result:
        directory = tmp_path / "demo"

    def run(config: Any) -> Result:
        directory = RunDirectory.create(config)
        directory.log_metrics({"step": 1, "reward/mean": 0.5})
        directory.close()
        return Result()

    assert run_with(monkeypatch, run, "recipe=arithmetic", f"output_dir={tmp_path}", "name=demo") == 0
    assert "Try next" in capsys.readouterr().out


def test_a_finished_run_that_is_resumed_says_so_and_keeps_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.orchestrator.configuration.compose import load_config

    words = ["recipe=arithmetic", f"output_dir={tmp_path}", "name=demo", "trainer.max_steps=3"]
    directory = RunDirectory.create(load_config(words))
    directory.event("start")
    directory.log_metrics({"step": 3, "reward/mean": 0.75})
    directory.event("end", steps=3)
    directory.model.mkdir()
    directory.close()
    before = {file.name: file.read_bytes() for file in directory.path.iterdir() if file.is_file()}
    assert cli.main(["run", *words, "resume=auto"]) == 0
    out = capsys.readouterr().out
    assert "demo has come to its end: 3 steps. Nothing is left to do" in out
    assert "0.750" in out
    assert before == {file.name: file.read_bytes() for file in directory.path.iterdir() if file.is_file()}


def test_report_rebuilds_the_page_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.orchestrator.configuration.compose import load_config

    directory = RunDirectory.create(load_config([f"output_dir={tmp_path}", "name=demo"]))
    assert cli.main(["report", str(directory.path)]) == 0
    assert directory.report.is_file()
    assert str(directory.report) in capsys.readouterr().out.replace("\n", "")
    assert cli.main(["report", str(tmp_path)]) == 2


@pytest.mark.real
def test_validate_prints_configuration_dataflow_plan_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "recipe=arithmetic"]) == 0
    out = capsys.readouterr().out
    for part in (
        "max_staleness: 0",
        "rollout",
        "Trainer-policy-0",
        "✓ model",
        "✓ data",
        "✓ held-out data",
        "✓ warm start",
    ):
        assert part in out


@pytest.mark.real
def test_validate_tells_all_faults_at_once_and_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "recipe=arithmetic", "reward.function=digit", "data.max_prompt_tokens=4"]) == 2
    out = capsys.readouterr().out
    assert "✗ reward" in out
    assert "✗ data" in out


def test_validate_tells_an_error_once_and_says_which_other_checks_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "recipe=tree", "environment.name=nope"]) == 2
    out = capsys.readouterr().out
    assert out.count("no environment is registered under this name") == 1
    assert "✗ data: as of environment, above" in out
    assert "✓ rows left out: none" in out


def test_errors_survive_pickling() -> None:
    for module in ("store.errors", "workers.agents.gateway.client_errors"):
        importlib.import_module(f"penstock.{module}")
    for cls in PenstockError.__subclasses__():
        assert str(pickle.loads(pickle.dumps(cls("what was wrong")))) == "what was wrong"


KEYS = {"serve": "TINKER_API_KEY", "ui": "PENSTOCK_UI_KEY"}


@pytest.mark.parametrize("command", KEYS)
def test_a_key_comes_from_a_file_or_a_variable_that_no_other_process_sees(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def key_of(*words: str) -> str:
        monkeypatch.setenv(KEYS[command], "tml-environment")
        found = cli.key_of(make_parser().parse_args([command, *words]), KEYS[command])
        assert KEYS[command] not in os.environ
        return found

    (tmp_path / "key").write_text("tml-file\n")
    assert key_of() == "tml-environment"
    assert key_of("--key-file", str(tmp_path / "key")) == "tml-file"
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=r"--key-file=file:.*/none: cannot be read"):
        key_of("--key-file", str(tmp_path / "none"))
    assert key_of("--key", "tml-word") == "tml-word"
    told = capsys.readouterr().err
    assert f"Use --key-file FILE, or {KEYS[command]}" in told
    assert "tml-word" not in told
