"""What a wish means for those that are there, and which cannot be granted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import CannotScale
from penstock.orchestrator.membership.wishes import Done, Wish, change_of, who_leaves

WISHES = st.builds(Wish, st.sampled_from(["rollout", "reward"]), st.integers(-9, 9), st.just(True)) | st.builds(
    Wish, st.sampled_from(["rollout", "reward"]), st.integers(0, 9)
)


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("rollout=+2", Wish("rollout", 2, is_change=True)),
        ("rollout=3", Wish("rollout", 3)),
        ("reward=-1", Wish("reward", -1, is_change=True)),
    ],
)
def test_a_wish_is_read_as_it_is_typed(text: str, wish: Wish) -> None:
    assert Wish.of(text) == wish


@given(WISHES)
def test_a_wish_is_told_as_it_would_be_typed(wish: Wish) -> None:
    assert Wish.of(str(wish)) == wish


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rollout", "Write rollout=.2"),
        ("rollout=two", "no wish"),
        ("trainer=+1", "no role that may change"),
        ("rolout=+1", "did you mean .rollout."),
    ],
)
def test_what_is_no_wish_is_told_by_what_it_should_be(text: str, told: str) -> None:
    with pytest.raises(CannotScale, match=told):
        Wish.of(text)


@given(WISHES, st.integers(1, 9))
def test_one_always_stays_and_a_number_is_reached_wherever_it_began(wish: Wish, present: int) -> None:
    try:
        after = present + change_of(wish, present, {})
    except CannotScale:
        assert (present + wish.number if wish.is_change else wish.number) < 1
    else:
        assert after >= 1
        assert after == (present + wish.number if wish.is_change else wish.number)


def test_a_role_that_cannot_change_says_why() -> None:
    with pytest.raises(CannotScale, match=r"rollout=\+1: engines and ranks met at the start"):
        change_of(Wish("rollout", 1, is_change=True), 2, {"rollout": "engines and ranks met at the start"})


def test_the_last_that_came_leave_first() -> None:
    assert who_leaves(["Rollout-0", "Rollout-1", "Rollout-4"], 2) == ["Rollout-4", "Rollout-1"]
    assert who_leaves(["Rollout-0"], 0) == []


def test_what_came_of_it_is_one_line() -> None:
    assert str(Done("rollout", 3, 2, [], ["Rollout-2"])) == "rollout: 3 -> 2 (Rollout-2 has left)"
    assert str(Done("reward", 2, 2)) == "reward: 2 -> 2"
