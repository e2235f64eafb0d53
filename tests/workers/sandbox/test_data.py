"""What counts as data, and as the same."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import NotPlainData
from penstock.workers.sandbox.data import parse, same

DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
def test_data_comes_back_as_it_was_and_is_the_same_as_itself(value):
    again = parse(json.dumps(value).encode())
    assert again == value
    assert same(value, again)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"\xff",
        b"9" * 5000,
        b"[" * 100_000,
        b"[1] 2",
        b"'a'",
        b"\x80\x04K\x01.",
    ],
    ids=range(11),
)
def test_what_is_no_data_is_refused(text):
    with pytest.raises(NotPlainData):
        parse(text)


@pytest.mark.parametrize(
    ("expected", "got", "equal"),
    [
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1.0, 1.001, False),
        (0.0, 1e-12, False),
        (0.0, -0.0, True),
        (1e-12, 5e-10, False),
        (1e-12, 1.0000000001e-12, True),
        (1, True, False),
        (False, 0, False),
        (None, 0, False),
        (None, False, False),
        (None, None, True),
        ("1", 1, False),
        ([], {}, False),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ({"a": [1.0]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (10**400, 1.0, False),
        (1e300, 10**300, True),
        (2**53, 2**53 + 1, False),
    ],
)
def test_the_same_is_what_a_person_would_call_so(expected, got, equal):
    assert same(expected, got) is equal
    assert same(got, expected) is equal


def test_no_value_that_is_not_finite_is_like_another():
    assert not same(1.0, math.inf)
    assert not same(math.nan, math.nan)
