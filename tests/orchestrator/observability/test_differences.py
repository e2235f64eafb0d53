"""What a person is shown of a configuration is what they, or their recipe, have set."""

from dataclasses import asdict

import pytest

from penstock.algorithms.catalogue import ALGORITHMS
from penstock.conf.algorithms import known_algorithms
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.differences import differences_of


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_of_an_algorithm_as_it_comes_only_the_name_is_shown(name: str) -> None:
    assert differences_of(asdict(load_config([f"algorithm={name}"]))) == {"algorithm": {"name": name}}


def test_what_was_set_is_shown_and_nothing_else() -> None:
    config = load_config(["recipe=arithmetic", "algorithm=ppo", "algorithm.clip_high=0.25", "seed=3"])
    shown = differences_of(asdict(config))
    assert shown["algorithm"].items() >= {"name": "ppo", "clip_high": 0.25}.items()
    assert "gamma" not in shown["algorithm"]
    assert shown["seed"] == 3
    assert "lr" in shown["trainer"]["optimizer"]
    assert "cluster" not in shown


def test_of_an_algorithm_that_is_not_known_all_keys_are_shown() -> None:
    settings = {"name": "somebodys_own", "group_size": 1, "sharpness": 2.0}
    assert differences_of({"algorithm": settings}) == {"algorithm": settings}


def test_the_known_algorithms_are_those_of_the_catalogue() -> None:
    assert known_algorithms() == {name: entry.config_class for name, entry in ALGORITHMS.items()}
