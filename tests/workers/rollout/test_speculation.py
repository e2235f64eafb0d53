"""When drafts pay: a share of accepted tokens, from seconds of decode steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.rollout import SpeculationConfig
from penstock.workers.rollout.speculation import (
    LEAST_DRAFTED,
    DraftCounts,
    StepSeconds,
    break_even,
    speculation_arguments,
    trial_sizes,
)

SECONDS = st.floats(1e-4, 1.0)


def test_steps_as_fast_with_drafts_as_without_pay_from_the_first_accepted_token() -> None:
    assert break_even(StepSeconds(0.1, 0.1, 0.1), 4, by_model=False) == 0


def test_a_step_twice_as_long_with_four_tokens_pays_from_a_quarter_accepted() -> None:
    assert break_even(StepSeconds(0.1, 0.13, 0.2), 4, by_model=False) == pytest.approx(0.25)


def test_a_draft_models_pass_is_no_part_of_a_step_without_drafts() -> None:
    """A step of 10 ms, a pass of the draft model of 2 ms, a token to check of 0.5 ms."""
    plain, draft, check, num = 10.0, 2.0, 0.5, 4
    seconds = StepSeconds(plain + draft, plain + draft + check, plain + num * (draft + check))
    assert break_even(seconds, num, by_model=True) == pytest.approx((draft + check) / plain)
    assert break_even(seconds, num, by_model=True) > break_even(seconds, num, by_model=False)


@given(plain=SECONDS, draft=SECONDS, check=SECONDS, num=st.integers(2, 16), share=st.floats(0, 1))
def test_drafts_pay_where_a_sequences_tokens_take_less_time(
    plain: float, draft: float, check: float, num: int, share: float
) -> None:
    if draft > plain:  # a draft model as slow as the model itself, which is not told apart
        return
    seconds = StepSeconds(plain + draft, plain + draft + check, plain + num * (draft + check))
    gain = (1 + num * share) * plain / seconds.all
    if abs(gain - 1) > 1e-6:
        assert (share > break_even(seconds, num, by_model=True)) == (gain > 1)


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


@pytest.mark.parametrize("config", [SpeculationConfig("ngram", 3, 8), SpeculationConfig("draft", 5, 300)])
def test_vllms_table_of_batch_sizes_has_the_drafts_that_trials_need(config: SpeculationConfig) -> None:
    arguments = speculation_arguments(config, "a-draft", 64)
    table = arguments["speculative_config"]["num_speculative_tokens_per_batch_size"]
    of_size = {size: drafted for first, last, drafted in table for size in range(first, last + 1)}
    assert sorted(of_size) == list(range(1, arguments["max_num_seqs"] + 1))
    assert arguments["max_num_seqs"] >= 64
    assert {of_size[size] for size in range(1, config.max_sequences + 1)} == {config.num_tokens}
    assert {drafted: of_size[size] for drafted, size in trial_sizes(config).items()} == {
        0: 0, 1: 1, config.num_tokens: config.num_tokens
    }  # fmt: skip
