from functools import partial

import pytest

from penstock.algorithms.advantages import ADVANTAGES
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.losses import SURROGATES
from penstock.algorithms.registry import FormulaRegistry
from penstock.conf.errors import ConfigError


def _one():
    return 1


def _two():
    return 2


def test_a_function_is_found_by_its_name_and_stays_a_plain_function():
    names = FormulaRegistry("algorithm.thing")
    assert names.register("one")(_one) is _one
    assert names.find("one") is _one


def test_a_function_stands_for_itself():
    assert FormulaRegistry("algorithm.thing").find(_two) is _two


def test_an_unknown_name_is_answered_with_the_nearest_one():
    names = FormulaRegistry("algorithm.thing")
    names.register("truncated")(_one)
    with pytest.raises(ConfigError, match=r"algorithm.thing=truncate: unknown; did you mean 'truncated'\?"):
        names.find("truncate")


def test_a_name_belongs_to_one_function():
    names = FormulaRegistry("algorithm.thing")
    names.register("one")(_one)
    names.register("one")(_one)  # a file that is loaded twice
    with pytest.raises(ConfigError, match=r"algorithm.thing=one: .*_two takes a name that .*_one has"):
        names.register("one")(_two)
    assert names.find("one") is _one


def test_a_partial_can_have_a_name():
    names = FormulaRegistry("algorithm.thing")
    names.register("one")(partial(_one))
    with pytest.raises(ConfigError, match="takes a name"):
        names.register("one")(partial(_two))


def test_the_builtin_names():
    assert sorted(SURROGATES) == [
        "cispo",
        "clip_cov",
        "dppo_tv",
        "gmpo",
        "gpg",
        "gspo",
        "gspo_token",
        "kl_cov",
        "ppo_clip",
        "reinforce",
        "sapo",
    ]
    assert sorted(CORRECTIONS) == ["masked", "none", "rejection", "sequence_truncated", "truncated"]
    assert sorted(ADVANTAGES) == [
        "dr_grpo",
        "gigpo",
        "gpg",
        "grpo",
        "mt_grpo",
        "opo",
        "rae",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "turn_rloo",
    ]
