"""The limit that an execution passed, by what its keeper has measured; what counts as data, and as the same."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import NotPlainData
from penstock.workers.sandbox.execution import (
    Ending,
    Failed,
    Limits,
    Value,
    outcome_of,
    parse,
    reason_of,
    results_of,
    same,
)

LIMITS = Limits(cpu_s=2.0, wall_s=5.0, output_bytes=100)
WELL = Ending(status=0, in_time=True, cpu_s=0.1, seconds=0.2)
KILLED = 9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "exited"),
        ({"status": 256}, "exited"),
        ({"in_time": False, "status": KILLED, "cpu_s": 1.9}, "timeout_wall"),
        ({"status": KILLED, "cpu_s": 1.98}, "timeout_cpu"),
        ({"status": 0, "cpu_s": 2.5}, "timeout_cpu"),
        ({"status": 0, "cpu_s": 1.98}, "exited"),
        ({"status": KILLED, "cpu_s": 0.5}, "signal"),
        ({"status": 11}, "signal"),
        ({"out_of_memory": True, "lost": True, "in_time": False}, "memory"),
        ({"status": KILLED, "lost": True}, "lost"),
        ({"stdout": b"x" * 101}, "output"),
        ({"stderr": b"x" * 101}, "output"),
        ({"answer": b"x" * 101}, "output"),
        ({"stdout": b"x" * 100}, "exited"),
    ],
)
def test_the_reason_is_the_limit_that_was_passed(change, reason):
    assert reason_of(replace(WELL, **change), LIMITS) == reason


def test_outputs_are_cut_and_made_readable():
    outcome = outcome_of(replace(WELL, stdout=b"\xff" + b"x" * 100, status=3 << 8), LIMITS)
    assert outcome.stdout == "\ufffd" + "x" * 99
    assert outcome.exit_code == 3
    assert not outcome.is_success
    assert outcome_of(replace(WELL, status=11), LIMITS).exit_code == -11


def test_each_call_has_a_result_whatever_was_written():
    answer = b'["value", 1]\n["raised", "E: x"]\n7\n["value"]\n["value", 1, 2]\n["value", 2'
    results = results_of(replace(WELL, answer=answer), 7, LIMITS)
    assert [type(result) for result in results] == [Value, *[Failed] * 6]
    assert [result.reason for result in results[1:] if isinstance(result, Failed)] == (
        ["raised", "not_data", "not_data", "not_data", "exited", "exited"]
    )
    assert results_of(replace(WELL, answer=b'["value", 1]\n["value", 2]\n'), 1, LIMITS) == [Value(1)]
    assert results_of(replace(WELL, answer=b'["unready", "E"]\n'), 2, LIMITS) == [Failed("unready", "E")] * 2
    assert results_of(replace(WELL, answer=b"x" * 101), 1, LIMITS)[0] == Failed("output", "more than 100 bytes")


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
