"""Trackers that cannot be used are refused before anything starts."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.prerequisites import check_trackers, need_modules
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.configuration.validate import checks


def checked(*words: str) -> str:
    return check_trackers(load_config(words).tracking)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_SERVER_URL", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))


def test_an_unknown_sink_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"sinks=wanb: unknown; did you mean 'wandb'\? Known: mlflow, ray, tens"):
        load_config(["tracking.sinks=[tensorboard,wanb]"])


def test_a_package_that_is_missing_is_told_with_the_command_that_brings_it() -> None:
    with pytest.raises(ConfigError, match="`pip install its-package`"):
        need_modules("sink", "a_module_of_no_package", "its-package")


def test_a_mode_of_the_environment_is_checked_as_the_key_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "of-line")
    with pytest.raises(ConfigError, match="WANDB_MODE=of-line: unknown; did you mean 'offline'"):
        checked("tracking.sinks=[wandb]")
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert checked("tracking.sinks=[wandb]") == "wandb dryrun"


@pytest.mark.real
def test_wandb_without_a_key_is_refused_as_it_would_ask_for_one() -> None:
    with pytest.raises(ConfigError, match="wandb login"):
        checked("tracking.sinks=[wandb]")
    assert checked("tracking.sinks=[wandb]", "tracking.wandb.mode=offline") == "wandb offline"


def test_a_directory_that_cannot_be_made_is_told_with_what_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for sink, variable in (("wandb", "WANDB_DIR"), ("trackio", "TRACKIO_DIR")):
        with pytest.raises(ConfigError, match=rf"tracking\.{sink}\.directory: cannot make {tmp_path}/file/a"):
            checked(f"tracking.sinks=[{sink}]", f"tracking.{sink}.directory={tmp_path}/file/a")
        monkeypatch.setenv(variable, f"{tmp_path}/file/b")
        with pytest.raises(ConfigError, match=rf"{variable}: cannot make {tmp_path}/file/b .*Set {variable} to a"):
            checked(f"tracking.sinks=[{sink}]")


def test_trackers_say_where_the_numbers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("tracking.sinks=[tensorboard,mlflow,trackio]", f"tracking.trackio.directory={tmp_path}")
    assert checked(*words) == f"mlflow at mlflow.db in output_dir, trackio in {tmp_path}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:2?write_token=secret")
    assert checked(*words) == "mlflow at http://127.0.0.1:1, trackio at http://127.0.0.1:2"


@pytest.mark.parametrize(("sinks", "is_checked"), [("[tensorboard,ray]", False), ("[mlflow]", True)])
def test_a_run_is_checked_for_the_trackers_that_it_asks_for(sinks: str, is_checked: bool) -> None:
    config = load_config(["recipe=arithmetic", f"tracking.sinks={sinks}"])
    assert ("trackers" in [check.name for check in checks(resolve(config))]) == is_checked
