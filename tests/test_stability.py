"""What the last release promised to keep is there, or is taken by its old name with a warning (docs/stability.md)."""

import json
import logging
from pathlib import Path

import pytest

import penstock
from penstock.conf import renamed
from penstock.conf.renamed import KEYS, METRICS, NAMES, NewName
from penstock.orchestrator.configuration.compose import load_config
from tests.stable import present

PROMISED = json.loads((Path(__file__).parent / "stable.json").read_text())
NOW = present()


def test_public_names_and_their_parameters_are_kept() -> None:
    for name, parameters in PROMISED["names"].items():
        now = NOW["names"].get(NAMES[name].name if name in NAMES else name)
        assert now is not None, f"penstock.{name} is gone: add it to NAMES of conf/renamed.py"
        assert [parameter for parameter in parameters if parameter not in now] == [], f"parameters of penstock.{name}"


def test_keys_are_kept() -> None:
    now = set(NOW["keys"])
    gone = [key for key in PROMISED["keys"] if (KEYS[key].name if key in KEYS else key) not in now]
    assert gone == [], "add them to KEYS of conf/renamed.py"


def test_metrics_are_kept() -> None:
    gone = set(PROMISED["metrics"]) - set(NOW["metrics"])
    assert [name for name in gone if not any(old.startswith(name) for old in METRICS)] == [], "see conf/renamed.py"
    assert {present.name for present in METRICS.values()} <= set(NOW["metrics"])


def test_commands_options_and_exit_codes_are_kept() -> None:
    for command, options in PROMISED["commands"].items():
        assert set(options) <= set(NOW["commands"].get(command, [])), command
    assert {name: NOW["exit_codes"].get(name) for name in PROMISED["exit_codes"]} == PROMISED["exit_codes"]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYS, "trainer.groups", NewName("trainer.groups_per_step", "0.3"))
    monkeypatch.setitem(KEYS, "rollout.staleness", NewName("max_staleness", "0.3"))


@pytest.mark.usefixtures("keys")
def test_an_old_key_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "recipe.yaml").write_text("trainer: {groups: 7, max_steps: 2}\nrollout.staleness: 1\n")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        config = load_config([f"recipe={tmp_path}"])
    assert (config.trainer.groups_per_step, config.trainer.max_steps, config.max_staleness) == (7, 2, 1)
    assert "trainer.groups is called trainer.groups_per_step now" in caplog.text
    assert "version 0.3 refuses the old name" in caplog.text
    assert load_config([f"recipe={tmp_path}", "trainer.groups=5"]).trainer.groups_per_step == 5
    (tmp_path / "recipe.yaml").write_text("trainer: {groups: 7, groups_per_step: 3}\n")
    assert load_config([f"recipe={tmp_path}"]).trainer.groups_per_step == 3


def test_an_old_public_name_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(renamed.NAMES, "fit", NewName("run", "0.3"))
    with pytest.warns(DeprecationWarning, match=r"penstock.fit is called run now: version 0\.3"):
        assert penstock.fit is penstock.run
    with pytest.raises(AttributeError, match=r"no attribute 'trian'"):
        penstock.trian  # noqa: B018
