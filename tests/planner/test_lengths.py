"""Lengths of responses have the mean that was asked for, whatever the cap, and are the same whenever they are drawn."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.lengths import POINTS, Lengths, Turns


@given(mean=st.floats(1, 4000), cap=st.integers(64, 8192), sigma=st.floats(0.0, 1.2))
def test_a_lognormal_that_is_cut_has_the_mean_that_was_asked_for(mean: float, cap: int, sigma: float) -> None:
    found = Lengths.lognormal(mean, cap, sigma)
    assert max(found.quantiles) <= cap
    assert found.mean == pytest.approx(min(mean, cap), rel=0.01, abs=1.0)
    assert list(found.quantiles) == sorted(found.quantiles)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=700))
def test_what_a_run_recorded_keeps_its_mean(lengths: list[int]) -> None:
    found = Lengths.recorded(lengths, prompt=10)
    assert len(found.quantiles) == POINTS
    assert min(lengths) <= found.mean <= max(lengths)
    if len(set(lengths)) == 1:
        assert found.mean == lengths[0]


def test_the_context_of_a_token_counts_long_responses_more_often() -> None:
    """Six tokens are decoded of a response of 2 and one of 4, after 0 1 and 0 1 2 3 of their own: 7 / 6, and as a
    stream 20 / 12."""
    found = Lengths((2, 4), prompt=10)
    assert found.mean_context == pytest.approx(10 + (4 + 16) / 2 / (2 * 3))


def test_turns_add_tokens_in_proportion_and_are_read_again_without_a_cache() -> None:
    """Three turns of one token in the mean, with 1.5 tokens before the second and the third: each token sampled brings
    one that is not. Before a further turn there are 10 + 1 and 10 + 2 + 1.5, of which half is read again."""
    found = Lengths((2, 4), prompt=10, turns=Turns(3, added=1.5, wait_s=2.0))
    assert (found.growth, found.waits_s, found.read, found.row_tokens(4)) == (2.0, 4.0, 3.0, 18.0)
    assert found.mean_context == pytest.approx(10 + 2 * (4 + 16) / 2 / (2 * 3))
    again = replace(found, turns=replace(found.turns, reread=0.5))
    assert again.read == pytest.approx(3 + 0.5 * (11 + 13.5))
    alone = replace(found, turns=Turns())
    assert (alone.growth, alone.waits_s, alone.read, alone.row_tokens(4)) == (1.0, 0.0, 0.0, 14.0)


def test_what_is_left_at_a_random_moment_is_half_of_what_is_met() -> None:
    """Half is left in the mean of constant lengths, and more than half of their mean of others."""
    constant, spread = Lengths((100,) * POINTS), Lengths.lognormal(100, 1000, 0.9)
    assert sum(constant.residuals) / len(constant.residuals) == pytest.approx(50, abs=2)
    assert sum(spread.residuals) / len(spread.residuals) > 60


def test_a_sample_has_the_same_length_whenever_it_is_asked_for() -> None:
    found = Lengths.lognormal(100, 400, 0.6)
    first = [found.of(group, sample, seed=3) for group in range(50) for sample in range(4)]
    assert first == [found.of(group, sample, seed=3) for group in range(50) for sample in range(4)]
    assert first != [found.of(group, sample, seed=4) for group in range(50) for sample in range(4)]
    assert sum(first) / len(first) == pytest.approx(found.mean, rel=0.15)
