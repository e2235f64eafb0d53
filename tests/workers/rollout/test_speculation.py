"""When drafts pay: a share of accepted tokens, from seconds of decode steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.rollout import SpeculationConfig
from penstock.workers.rollout.speculation import (
    LEAST_DRAFTED,
    DraftCounts,
    break_even,
    speculative_config,
)

SECONDS = st.floats(1e-4, 1.0)


def test_steps_as_fast_with_drafts_as_without_pay_from_the_first_accepted_token() -> None:
    assert break_even(0.1, 0.1, 4) == 0


def test_a_step_twice_as_long_with_four_tokens_pays_from_a_quarter_accepted() -> None:
    assert break_even(0.1, 0.2, 4) == pytest.approx(0.25)


@given(plain_s=SECONDS, drafting_s=SECONDS, num=st.integers(1, 16), share=st.floats(0, 1))
def test_drafts_pay_where_a_sequences_tokens_take_less_time(
    plain_s: float, drafting_s: float, num: int, share: float
) -> None:
    gain = (1 + num * share) * plain_s / drafting_s
    if abs(gain - 1) > 1e-6:
        assert (share > break_even(plain_s, drafting_s, num)) == (gain > 1)


def test_acceptance_is_judged_by_enough_tokens_and_anew_each_time() -> None:
    counts = DraftCounts()
    counts.add(LEAST_DRAFTED - 1, 0)
    assert not counts.is_slower(0.5)
    counts.add(1, 0)
    assert counts.is_slower(0.5)
    assert not counts.is_slower(0.5)
    counts.add(LEAST_DRAFTED, LEAST_DRAFTED * 6 // 10)
    assert not counts.is_slower(0.5)
    counts.add(LEAST_DRAFTED, LEAST_DRAFTED * 4 // 10)
    assert counts.is_slower(0.5)
    assert (counts.drafted, counts.accepted) == (3 * LEAST_DRAFTED, LEAST_DRAFTED)


def test_vllm_drafts_nothing_for_more_sequences_than_asked_for() -> None:
    found = speculative_config(SpeculationConfig("ngram", 3, max_sequences=8), "", 64)
    assert found["num_speculative_tokens_per_batch_size"] == [(1, 8, 3), (9, 64, 0)]
    found = speculative_config(SpeculationConfig("draft", 3, max_sequences=64), "a-draft", 64)
    assert found == {"num_speculative_tokens": 3, "method": "draft_model", "model": "a-draft"}
