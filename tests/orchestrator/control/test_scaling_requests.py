"""What a request means for those that are there, and which cannot be granted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import CannotScale
from penstock.orchestrator.control.scaling_requests import (
    ScalingRequest,
    ScalingResult,
    change_of,
    longest_answer_s,
    who_leaves,
)

REQUESTS = st.builds(
    ScalingRequest, st.sampled_from(["rollout", "reward"]), st.integers(-9, 9), st.just(True)
) | st.builds(ScalingRequest, st.sampled_from(["rollout", "reward"]), st.integers(0, 9))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rollout=+2", ScalingRequest("rollout", 2, is_change=True)),
        ("rollout=3", ScalingRequest("rollout", 3)),
        ("reward=-1", ScalingRequest("reward", -1, is_change=True)),
    ],
)
def test_a_request_is_read_as_it_is_typed(text: str, wanted: ScalingRequest) -> None:
    assert ScalingRequest.of(text) == wanted


@given(REQUESTS)
def test_a_request_is_told_as_it_would_be_typed(wanted: ScalingRequest) -> None:
    assert ScalingRequest.of(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rollout", "Write rollout=.2"),
        ("rollout=two", "no request"),
        ("trainer=+1", "no role that may change"),
        ("rolout=+1", "did you mean .rollout."),
    ],
)
def test_what_is_no_request_is_told_by_what_it_should_be(text: str, told: str) -> None:
    with pytest.raises(CannotScale, match=told):
        ScalingRequest.of(text)


@given(REQUESTS, st.integers(1, 9))
def test_one_always_stays_and_a_number_is_reached_wherever_it_began(wanted: ScalingRequest, present: int) -> None:
    try:
        after = present + change_of(wanted, present, {})
    except CannotScale:
        assert (present + wanted.number if wanted.is_change else wanted.number) < 1
    else:
        assert after >= 1
        assert after == (present + wanted.number if wanted.is_change else wanted.number)


def test_a_role_that_cannot_change_says_why() -> None:
    with pytest.raises(CannotScale, match=r"rollout=\+1: engines and ranks met at the start"):
        change_of(ScalingRequest("rollout", 1, is_change=True), 2, {"rollout": "engines and ranks met at the start"})


def test_the_last_that_came_leave_first() -> None:
    assert who_leaves(["Rollout-0", "Rollout-1", "Rollout-4"], 2) == ["Rollout-4", "Rollout-1"]
    assert who_leaves(["Rollout-0"], 0) == []


def test_what_came_of_it_is_one_line() -> None:
    assert str(ScalingResult("rollout", 3, 2, [], ["Rollout-2"])) == "rollout: 3 -> 2 (Rollout-2 has left)"
    assert str(ScalingResult("reward", 2, 2)) == "reward: 2 -> 2"


@pytest.mark.parametrize(
    ("recorded", "drain_s", "longest_s"),
    [
        ({"enforce_eager": True, "compile_timeout_s": 900.0}, None, 60 + 2 * 100 + 30),
        ({"enforce_eager": False, "compile_timeout_s": 900.0}, None, 60 + 2 * (100 + 900) + 30),
        ({"enforce_eager": False, "compile_timeout_s": 900.0}, 0.0, 60 + 2 * (100 + 900)),
        ({"enforce_eager": True}, None, 60 + 2 * 100 + 30),  # by a version without the key
    ],
)
def test_the_answer_is_awaited_while_an_engine_may_start(
    recorded: dict[str, Any], drain_s: float | None, longest_s: float
) -> None:
    assert longest_answer_s({"start_timeout_s": 100.0, "drain_s": 30.0, **recorded}, drain_s) == longest_s
