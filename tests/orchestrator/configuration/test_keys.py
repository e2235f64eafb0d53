"""The reference of the keys is that of the dataclasses: whole, with a meaning for each, and each can be set."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.algorithms.catalogue import ALGORITHMS
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.keys import Key, reference, sections, show

PAGE = Path(__file__).parents[3] / "docs" / "keys.md"
MADE_BY = "python -m penstock.orchestrator.configuration.keys > docs/keys.md"


def keys() -> list[Key]:
    return [key for section in sections() for key in section.keys]


def test_the_page_is_what_the_dataclasses_say() -> None:
    assert PAGE.read_text() == reference(), f"write it anew: {MADE_BY}"


def test_every_key_says_what_it_means() -> None:
    assert len(keys()) > 280
    assert [key.name for key in keys() if not key.text] == []


def test_every_key_can_be_set_to_its_default() -> None:
    plain = [
        key for key in keys() if not key.name.startswith("algorithm.") and not {"N", "NAME"} & set(key.name.split("."))
    ]
    load_config([f"{key.name}={key.default}" for key in plain if key.name != "recipe"])


def test_no_number_may_be_none_or_endless() -> None:
    numbers = [key for key in keys() if "float" in key.kind and not {"N", "NAME"} & set(key.name.split("."))]
    assert len(numbers) > 60
    for key in numbers:
        base = [f"algorithm={algorithm_with(key)}"] if key.name.startswith("algorithm.") else []
        for value in ("nan", "inf", "-inf"):
            with pytest.raises(ConfigError):
                load_config([*base, f"{key.name}={f'[{value}]' if 'list' in key.kind else value}"])


def algorithm_with(key: Key) -> str:
    """An algorithm that has the key."""
    titles = [one.title for one in sections() if one.title.startswith("algorithm=") and key in one.keys]
    return titles[0].removeprefix("algorithm=").split(", ")[0]


BUILT_IN = sorted(name for name, one in ALGORITHMS.items() if one.build.__module__.startswith("penstock.algorithms."))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_keys_of_an_algorithm_can_be_set_to_their_defaults(name: str) -> None:
    (section,) = [one for one in sections() if name in one.title.removeprefix("algorithm=").split(", ")]
    load_config([f"algorithm={name}", *(f"{key.name}={key.default}" for key in section.keys)])


def said_of(*words: str) -> str:
    told = io.StringIO()
    show(words, Console(file=told, width=80))
    return told.getvalue()


def test_a_key_is_found_by_its_name_and_else_by_what_it_means() -> None:
    assert said_of("max_staleness").startswith("max_staleness int = 0\n    Versions that a trained token's weights")
    assert "rollout.max_concurrent_samples" in said_of("Sequences", "engine decodes")
    assert said_of().count(" = ") >= len({key.name for key in keys()})
    assert "verl's data.train_batch_size is here trainer.groups_per_step" in said_of("batch size")
    assert "TRL's learning_rate is here trainer.optimizer.lr" in said_of("learning_rate")
    with pytest.raises(ConfigError, match="no key is called 'no_such'"):
        said_of("no_such")
