"""A text means the same in a recipe and on the command line: what the type of its key makes of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from penstock.conf.errors import ConfigError
from penstock.conf.reward import RewardConfig
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.overrides import Schema
from penstock.orchestrator.configuration.values import Plain, read_yaml, unquoted
from penstock.orchestrator.run_directory.run_directory import to_yaml


def by_word(key: str, text: str) -> RunConfig:
    return load_config([f"{key}={text}"])


def by_recipe(directory: Path, key: str, text: str) -> RunConfig:
    (directory / "recipe.yaml").write_text(f"{key}: {text}\n")
    return load_config([f"recipe={directory}"])


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("name", "2e90114", "2e90114"),
        ("name", "no", "no"),
        ("name", "1:30", "1:30"),
        ("name", "2026-01-01", "2026-01-01"),
        ("name", "010", "010"),
        ("name", "1e3", "1e3"),
        ("name", "true", "true"),
        ("name", "'null'", "null"),
        ("name", "null", None),
        ("description", "0x1F", "0x1F"),
        ("model.path", "12", "12"),
        ("tracking.tags", "{commit: 2e90114, day: 2026-01-01, round: 1_0}",
         {"commit": "2e90114", "day": "2026-01-01", "round": "1_0"}),
        ("rollout.sampling.stop", "[1e3, no, '</s>', 'null']", ["1e3", "no", "</s>", "null"]),
        ("trainer.optimizer.lr", "1e-3", 1e-3),
        ("trainer.optimizer.betas", "[9e-1, 1e-1]", [0.9, 0.1]),
        ("trainer.max_steps", "1_000", 1000),
        ("data.shuffle", "no", False),
        ("rollout.num_workers", "auto", "auto"),
        ("rollout.num_workers", "3", 3),
        ("trainer.activation_checkpointing", "off", False),
        ("reward.options", "{scale: 1e-3, commit: 2e90114, at: 1:30, on: no, day: 2026-01-01, 1: [2, x]}",
         {"scale": 1e-3, "commit": "2e90114", "at": "1:30", "on": "no", "day": "2026-01-01", "1": [2, "x"]}),
        ("reward.options", "{n: null, t: TRUE, quoted: '1e-3', inner: {1: 2}}",
         {"n": None, "t": True, "quoted": "1e-3", "inner": {1: 2}}),
        ("data.mixture", "{1e3: {path: 5, weight: 2}}", None),
    ],
)  # fmt: skip
def test_a_text_means_the_same_in_a_recipe_and_on_the_command_line(
    tmp_path: Path, key: str, text: str, value: Any
) -> None:
    word, recipe = value_at(by_word(key, text), key), value_at(by_recipe(tmp_path, key, text), key)
    assert word == recipe
    assert repr(word) == repr(recipe)
    if key == "data.mixture":
        assert (word["1e3"].path, word["1e3"].weight) == ("5", 2.0)
    else:
        assert (word, type(word)) == (value, type(value))


TEXTS = st.one_of(
    st.text(st.sampled_from("019_.+-eE:nofialsturygx~ /"), min_size=1, max_size=8),
    st.sampled_from(["on", "Off", "y", "N", ".inf", "-nan", "1_0", "0o17", "0x1f", "1:2:3", "2001-12-14", "<<", "="]),
)  # fmt: skip


@given(text=TEXTS)
def test_any_text_that_yaml_has_as_one_scalar_is_what_the_command_line_has(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    try:
        scalar = yaml.compose(f"x: {text}\n", yaml.SafeLoader).value[0][1]
    except yaml.YAMLError:
        return
    if not isinstance(scalar, yaml.ScalarNode) or scalar.style is not None or scalar.value != text:
        return
    found = written(tmp_path_factory, f"x: {text}\n")["x"]
    assert isinstance(found, Plain)
    assert found == unquoted(text) == text


PRINTED = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), PRINTED, TEXTS),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(PRINTED, inner)),
)


@given(value=VALUES)
def test_the_yaml_of_a_run_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    options = {"value": value}
    text = to_yaml(RunConfig(reward=RewardConfig(options=options)))
    tree = OmegaConf.create(Schema().fit(written(tmp_path_factory, text))["reward"]["options"])
    assert OmegaConf.to_container(tree, resolve=True) == options


def written(directories: pytest.TempPathFactory, text: str) -> Any:
    file = directories.getbasetemp() / "written.yaml"
    file.write_text(text, encoding="utf-8")
    return read_yaml(file)


def test_texts_of_prompts_stay_as_typed(tmp_path: Path) -> None:
    for text in ["[{prompt}]", "{prompt}", "Answer 'yes' or 'no'", "a, b", r"Put it in \boxed{}, {prompt}", "x: y # z"]:
        assert by_word("data.prompt_template", text).data.prompt_template == text
    assert by_word("data.prompt_template", '"Say \\"no\\": {prompt}"').data.prompt_template == 'Say "no": {prompt}'
    with pytest.raises(ConfigError, match=r"prompt_template=.*expected str, got dict. Write it in quotes"):
        by_recipe(tmp_path, "data.prompt_template", "{prompt}")


@pytest.mark.parametrize(
    ("text", "lines", "key"),
    [
        ("trainer: {max_steps: 3}\nseed: 1\ntrainer: {num_ranks: 2}\n", "1 and 3", "trainer"),
        ("trainer:\n  max_steps: 3\n  max_steps: 4\n", "2 and 3", "max_steps"),
        ("trainer.max_steps: 3\ntrainer:\n  max_steps: 4\n", "1 and 3", "trainer.max_steps"),
        ("reward:\n  options:\n    a: 1\n    'a': 2\n", "3 and 4", "a"),
    ],
)
def test_a_key_that_is_there_twice_is_refused_with_both_lines(tmp_path: Path, text: str, lines: str, key: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"recipe\.yaml lines {lines}: {key} is there twice"):
        load_config([f"recipe={tmp_path}"])


def test_yamls_merges_and_references_still_work(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "reward:\n  options:\n    first: &a {x: 1, y: 2}\n    second: {<<: *a, y: 3}\n    third: *a\n"
    )
    options = load_config([f"recipe={tmp_path}"]).reward.options
    assert options == {"first": {"x": 1, "y": 2}, "second": {"x": 1, "y": 3}, "third": {"x": 1, "y": 2}}


@pytest.mark.parametrize("text", ["Use ${x} here: {prompt}", r"so $\sqrt{2}$ is ${\sqrt{2}}$", "${", "${x"])
def test_a_prompt_with_a_dollar_and_a_brace_is_told_how_to_be_written(tmp_path: Path, text: str) -> None:
    escaped = text.replace("${", r"\${")
    (tmp_path / "block").mkdir()
    for words in (
        lambda: by_word("data.system_prompt", text),
        lambda: by_recipe(tmp_path, "data.system_prompt", f"|-\n  {text}"),
    ):
        with pytest.raises(ConfigError, match=r"data\.system_prompt.*write \\\$\{…\}"):
            words()
    config = by_word("data.system_prompt", escaped)
    assert config.data.system_prompt == text
    assert by_recipe(tmp_path, "data.system_prompt", f"|-\n  {escaped}").data.system_prompt == text
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    assert load_config([f"recipe={tmp_path}"]).data.system_prompt == text


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("data.mixture={a: 3}", ["data.mixture.a=3: is a section; set its keys: weight, source"]),
        ("data.mixture={a: {wieght: 3}}", ["data.mixture.a.wieght: unknown key", "'weight'"]),
        ("rewards=[math_verify]", ["rewards.0=math_verify: is a section; set its keys: function"]),
        ("trainer.optimizer.lr=1e-5,1e-4", ["expected float", "penstock sweep trainer.optimizer.lr=1e-5,1e-4"]),
        ("seed=range(1,4)", ["expected int", "penstock sweep seed=range(1,4)"]),
        ("output_dir=null", ["expected str", "in quotes"]),
    ],
)
def test_what_does_not_fit_is_told_in_words_of_our_own(word: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([word])
    for part in parts:
        assert part in str(caught.value)
