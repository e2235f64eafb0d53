from functools import partial

import pytest

from penstock.algorithms.registry import NO_OPTIONS, NonNegative, Positive, checked_options
from penstock.conf.errors import ConfigError


def formula(
    new,
    old,
    *,
    clip: NonNegative = 0.2,
    temperature: Positive | None = None,
    shift: float = 0.0,
    steps: int = 1,
    how: str = "a",
    strict: bool = False,
    table: dict | None = None,
    loose=None,
):
    return new


def test_options_come_back_as_they_are():
    options = {"clip": 0, "temperature": None, "shift": -1, "steps": 2, "how": "b", "strict": True, "loose": object()}
    assert checked_options(formula, options, "key") == options
    assert checked_options(formula, NO_OPTIONS, "key") == {}
    assert checked_options(formula, {"table": {}}, "key") == {"table": {}}


def test_a_partial_is_checked_like_its_function():
    with pytest.raises(ConfigError, match=r"key.clip=-1"):
        checked_options(partial(formula, shift=1.0), {"clip": -1}, "key")


def test_an_object_that_is_called_is_checked_like_a_function():
    class Formula:
        def __call__(self, new, *, clip: NonNegative = 0.2):
            return new

    assert checked_options(Formula(), {"clip": 1}, "key") == {"clip": 1}
    with pytest.raises(ConfigError, match=r"key.clip=-1"):
        checked_options(Formula(), {"clip": -1}, "key")
    with pytest.raises(ConfigError, match=r"key.clap: Formula has no such option"):
        checked_options(Formula(), {"clap": -1}, "key")


def test_types_that_cannot_be_found_are_not_checked_but_names_are():
    def own(new, *, clip: "Elsewhere" = 0.2):  # noqa: F821 - a name that did not travel with its function
        return new

    assert checked_options(own, {"clip": -1}, "key") == {"clip": -1}
    with pytest.raises(ConfigError, match=r"key.clap: own has no such option; did you mean 'clip'"):
        checked_options(own, {"clap": 1}, "key")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clipp": 0.1}, r"key.clipp: formula has no such option; did you mean 'clip'\?"),
        ({"new": 0.1}, "key.new: formula has no such option"),
        ({"clip": -0.1}, "key.clip=-0.1: must be a finite number, at least 0"),
        ({"clip": float("inf")}, "key.clip=inf"),
        ({"temperature": 0.0}, "key.temperature=0.0: must be a finite number, above 0"),
        ({"clip": "wide"}, "key.clip='wide': expected float, not str"),
        ({"clip": True}, "key.clip=True: expected float, not bool"),
        ({"temperature": "hot"}, "key.temperature='hot': expected float or null, not str"),
        ({"steps": 1.5}, "key.steps=1.5: expected int, not float"),
        ({"steps": False}, "key.steps=False: expected int, not bool"),
        ({"how": 3}, "key.how=3: expected str, not int"),
        ({"strict": 1}, "key.strict=1: expected bool, not int"),
    ],
)
def test_a_wrong_option_is_refused_by_its_key(options, message):
    with pytest.raises(ConfigError, match=message):
        checked_options(formula, options, "key")
