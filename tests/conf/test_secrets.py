"""A secret among the settings is shown nowhere, and reaches the one who uses it."""

import copy
import json
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from penstock.conf.data import DataConfig, EvaluationConfig, EvaluationSetConfig, PartConfig
from penstock.conf.errors import ConfigError
from penstock.conf.reward import WeightedRewardConfig
from penstock.conf.run import RunConfig, WarmStartConfig
from penstock.conf.secret import FREE, Secret, hide, hide_in, hide_lines, hide_word, reveal
from penstock.conf.serve import ServeConfig, TenantConfig, hash_of
from penstock.conf.tracking import MlflowConfig, TrackingConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory, to_yaml
from penstock.workers.agents.environment import make_environment

VALUE = "s3cr3t-value"


def told_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "show",
    [
        str, repr, "{}".format, "{!r:>20}".format, lambda one: one + "", lambda one: "".join([one]), json.dumps,
        lambda one: repr(TenantConfig(key=one)), lambda one: repr(asdict(TenantConfig(key=one))),
        lambda one: OmegaConf.to_yaml(OmegaConf.structured(TenantConfig(key=one))),
        lambda one: told_of(ValueError(one)), lambda one: repr(copy.deepcopy([one])),
        lambda one: repr(pickle.loads(pickle.dumps(one))),
    ],
)  # fmt: skip
def test_what_shows_a_secret_shows_stars(show: Any) -> None:
    shown = show(Secret(VALUE))
    assert VALUE not in shown
    assert "***" in shown


@pytest.mark.parametrize("move", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_it_keeps_its_value_on_the_way_to_another_process(move: Any) -> None:
    assert reveal(move({"a": [Secret(VALUE)]})) == {"a": [VALUE]}


def test_it_is_read_from_the_environment_or_a_file_whose_place_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", VALUE)
    (tmp_path / "key").write_text(f"{VALUE}\n")
    for place in ("env:A_KEY", f"file:{tmp_path}/key"):
        found = Secret.read(place)
        assert (str(found), reveal(found)) == (place, VALUE)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("env:NOT_THERE", "a.key=env:NOT_THERE: this process has no such variable"),
        ("file:/not/there", "a.key=file:/not/there: cannot be read"),
        ("file:/dev/null", "is empty"),
        ("***", r"a.key=\*\*\*: stands for a secret that is not kept"),
    ],
)
def test_a_place_without_a_secret_is_refused(place: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Secret.read(place, "a.key")


OPTIONS = {
    "api_key": VALUE, "hf_token": VALUE, "password": VALUE, "key": VALUE, "OPENAI_API_KEY": VALUE, "token": 17,
    "headers": {"Authorization": VALUE, "x-team": VALUE}, "env": {"SEARCH": VALUE, "LANG": None},
    "servers": [{"url": f"https://me:{VALUE}@tools/mcp"}, {"url": f"https://tools/mcp?apiKey={VALUE}&n=3"}],
}  # fmt: skip
PLAIN = {
    "max_tokens": 5,
    "answer_key_column": "b",
    "strict": True,
    "env": {"taskset": {"id": "a"}},
    "url": "http://h:1/v1",
}


def test_options_are_hidden_by_their_names_and_all_others_are_shown() -> None:
    hidden = hide(OPTIONS, "reward.options")
    assert VALUE not in f"{hidden} {json.dumps(hidden)}"
    assert hidden["servers"] == [{"url": "https://me:***@tools/mcp"}, {"url": "https://tools/mcp?apiKey=***&n=3"}]
    assert hidden["token"] == "***"
    assert reveal(hidden) == OPTIONS
    assert hide(hidden, "reward.options") == hidden
    assert hide(PLAIN, "reward.options") == PLAIN


def sections_of(section: Any) -> Iterator[Any]:
    yield section
    for field in fields(section):
        value = getattr(section, field.name)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for one in inner:
            if is_dataclass(one):
                yield from sections_of(one)


def test_all_options_of_a_run_are_hidden_wherever_they_are() -> None:
    config = RunConfig(
        data=DataConfig(mixture={"a": PartConfig()}), rewards=[WeightedRewardConfig()],
        evaluation=EvaluationConfig(sets={"hard": EvaluationSetConfig()}),
    )  # fmt: skip
    count = 0
    for section in sections_of(config):
        for name in FREE:
            if hasattr(section, name):
                setattr(section, name, {"api_key": VALUE})
                count += 1
    assert count == 9
    config = replace(config)
    assert VALUE not in repr(config) + to_yaml(config) + json.dumps(asdict(config))
    assert to_yaml(config).count("api_key: '***'") == count


def test_a_run_leaves_none_and_its_words_bring_it_to_the_resumed_one(tmp_path: Path) -> None:
    words = [
        "recipe=arithmetic", f"+reward.options.api_key={VALUE}", f"serve.tenants.alice.key=tml-{VALUE}",
        f"tracking.mlflow.tracking_uri=http://me:{VALUE}@tracker:5000", f"output_dir={tmp_path}", "name=a",
    ]  # fmt: skip
    config = load_config(words)
    with_sub_runs = replace(config, warm_start=WarmStartConfig("sft", [f"+reward.options.api_key={VALUE}"]))
    directory = RunDirectory.create(with_sub_runs)
    directory.event("tracker_failed", error=f"no answer of http://me:{VALUE}@tracker:5000/api?token={VALUE}&x=1")
    directory.close()
    left = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file())
    assert VALUE not in left + repr(config)
    assert "tracking_uri: http://me:***@tracker:5000" in left
    assert "no answer of http://me:***@tracker:5000/api?token=***&x=1" in left
    again = load_config(words)
    assert reveal(again.reward.options["api_key"]) == VALUE
    assert reveal(again.tracking.mlflow.tracking_uri) == f"http://me:{VALUE}@tracker:5000"
    assert reveal(again.serve.tenants["alice"].key) == hash_of(f"tml-{VALUE}")
    (word,) = with_sub_runs.warm_start.overrides
    assert reveal(load_config(["recipe=arithmetic", word]).reward.options["api_key"]) == VALUE


def test_an_environment_of_ones_own_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, **given): self.given = given\n    async def run(self, task, ctx): ...\n"
    )
    monkeypatch.setenv("A_KEY", VALUE)
    words = [f"environment.name={tmp_path}/mine.py:Mine", "data.source=environment"]
    options = f"environment.options={{api_key: {VALUE}, token: 'env:A_KEY', url: 'http://me:{VALUE}@tools'}}"
    config = load_config(["recipe=arithmetic", *words, options])
    given = make_environment(config.environment).given
    assert given == {"api_key": VALUE, "token": VALUE, "url": f"http://me:{VALUE}@tools"}
    assert VALUE not in repr(config)


@pytest.mark.parametrize(
    "words",
    [
        [f"serve.tenants.alice=tml-{VALUE}"], [f"serve.tenants={{alice: {{key: [{VALUE}]}}}}"],
        [f"reward.options=[{{api_key: {VALUE}}}]"], [f"output_dir=sftp://me:{VALUE}@host/runs"],
        [f"data.path=https://me:{VALUE}@host/a.jsonl"], [f"seed={{api_key: {VALUE}}}"],
    ],
)  # fmt: skip
def test_an_error_about_settings_does_not_repeat_it(words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["recipe=arithmetic", *words])
    assert VALUE not in told_of(error.value)
    assert "***" in str(error.value)


def test_words_of_a_command_are_shown_without_it() -> None:
    shown = [hide_word(word) for word in (f"+reward.options.api_key={VALUE}", "reward.options.key=env:A", "seed=3")]
    assert shown == ["+reward.options.api_key=***", "reward.options.key=env:A", "seed=3"]


def test_lines_with_addresses_stay_what_they_are() -> None:
    line = json.dumps({"url": "http://host:80", "mail": "a@b", "size": "1?x=2", "key": "k"})
    assert hide_in(line) == line
    quoted = json.dumps({"said": f'GET "http://me:{VALUE}@host/?token={VALUE}" failed'})
    assert json.loads(hide_in(quoted)) == {"said": 'GET "http://me:***@host/?token=***" failed'}


def test_lines_that_set_a_secret_are_shown_without_it() -> None:
    text = "\n".join([
        f"+    api_key: {VALUE}", f'-wandb.api_key = "{VALUE}"  # mine', f"     token: '{VALUE}',",
        "+  api_key: env:KEY", "+key = sorted(names)", "+  max_tokens: 1024", f"+url: http://me:{VALUE}@host",
    ])  # fmt: skip
    assert hide_lines(text).split("\n") == [
        "+    api_key: ***", '-wandb.api_key = "***"  # mine', "     token: '***',",
        "+  api_key: env:KEY", "+key = sorted(names)", "+  max_tokens: 1024", "+url: http://me:***@host",
    ]  # fmt: skip


def test_equal_keys_of_tenants_are_found_though_they_are_hidden() -> None:
    with pytest.raises(ConfigError, match="another tenant's"):
        ServeConfig(tenants={"a": TenantConfig(key="tml-1"), "b": TenantConfig(key=hash_of("tml-1"))})
    ServeConfig(tenants={"a": TenantConfig(key="tml-1"), "b": TenantConfig(key="tml-2")})


def test_an_address_without_a_password_is_a_plain_text() -> None:
    assert not isinstance(TrackingConfig(mlflow=MlflowConfig("http://tracker:5000")).mlflow.tracking_uri, Secret)
