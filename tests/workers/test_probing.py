"""What a probe finds out: a row's difference, an engine's temperature, a token that was written twice."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.probing import (
    NUM_KEPT,
    POSITIONS,
    ProbeRow,
    RecentSamples,
    at_temperature,
    call_of,
    compare,
    fitted_temperature,
)
from penstock.workers.protocols import Completion, SampleOutput, Sampling
from tests.amounts import amount

VOCABULARY = 12
PLAIN = Sampling(seed=1)


def vocabulary_scores(num: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """`[num, V]`: log-probabilities at temperature 1."""
    logits = np.random.default_rng(seed).normal(0, scale, (num, VOCABULARY))
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), np.float32)


def row_and_output(temperature: float, sampled_at: float, num: int = 20) -> tuple[ProbeRow, SampleOutput]:
    """A row of `num` tokens after a prompt of two, recorded at one temperature, and what a right engine says of it."""
    whole = vocabulary_scores(num)
    ids = np.random.default_rng(1).integers(0, VOCABULARY, num).astype(np.int32)
    known = at_temperature(whole, ids, sampled_at).astype(np.float32)
    row = ProbeRow(np.concatenate([[1, 2], ids]).astype(np.int32), known, temperature)
    scores = np.concatenate([[np.nan, -1.0], at_temperature(whole, ids, 1.0)]).astype(np.float32)
    return row, SampleOutput([], scores, None, None, whole[-POSITIONS:])


def completion(versions: Sequence[int], tokens: Sequence[int] | None = None, logprob: float = -1.0) -> Completion:
    ids = list(tokens or range(len(versions)))
    return Completion(ids, [logprob] * len(ids), list(versions), "", "stop")


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_a_right_engine_differs_by_rounding_at_any_temperature(temperature: float) -> None:
    row, output = row_and_output(temperature, temperature)
    for is_own in (False, True):
        answer = compare(row, output, is_own)
        assert answer is not None
        assert answer.differences.max() < 1e-6
        assert len(answer.differences) == (20 if temperature == 1 else POSITIONS)
        assert not answer.is_doubled
        assert math.isnan(answer.temperature) or answer.temperature == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_temperature_that_is_off_by_a_percent_is_found_to_be_so(temperature: float) -> None:
    row, output = row_and_output(temperature, 1.01 * temperature)
    answer = compare(row, output, is_own=True)
    assert answer is not None
    assert answer.temperature == pytest.approx(1.01, abs=1e-4)
    assert answer.differences.mean() > 1e-3


@given(st.integers(0, 1000), st.floats(0.3, 2.0), st.floats(0.7, 1.4))
@pytest.mark.histories
def test_the_temperature_that_tokens_were_recorded_at_is_found(seed: int, asked: float, factor: float) -> None:
    whole, ids = vocabulary_scores(POSITIONS, seed), np.random.default_rng(seed).integers(0, VOCABULARY, POSITIONS)
    found = fitted_temperature(whole, ids, at_temperature(whole, ids, asked * factor), asked)
    assert found == pytest.approx(asked * factor, rel=1e-2)


def test_a_sure_model_says_nothing_of_its_temperature() -> None:
    whole = np.full((4, VOCABULARY), -60.0, np.float32)
    whole[:, 3] = 0.0
    assert math.isnan(fitted_temperature(whole, np.full(4, 3), np.zeros(4), 1.0))


def test_a_difference_that_no_temperature_explains_is_of_none() -> None:
    row, output = row_and_output(1.0, 1.0)
    noise = np.random.default_rng(3).normal(0, 0.1, len(row.logprobs)).astype(np.float32)
    answer = compare(ProbeRow(row.token_ids, row.logprobs + noise), output, is_own=True)
    assert answer is not None
    assert math.isnan(answer.temperature)


def test_at_another_temperature_chosen_scores_alone_compare_nothing() -> None:
    row, output = row_and_output(0.6, 0.6)
    assert compare(row, SampleOutput([], output.prompt_logprobs), is_own=True) is None


def test_a_token_written_twice_is_told_from_others_that_differ() -> None:
    scores = np.array([np.nan, -2.0, -1.0, -1.5, -4.0], np.float32)
    twice = ProbeRow(np.array([1, 7, 8, 9, 9], np.int32), np.array([-2.0, -1.0, -1.5, -1.5], np.float32))
    another = ProbeRow(np.array([1, 7, 8, 9, 6], np.int32), twice.logprobs)
    stale = ProbeRow(twice.token_ids, twice.logprobs - np.float32(2.0))
    found = [compare(row, SampleOutput([], scores), is_own=True) for row in (twice, another, stale)]
    assert [one is not None and one.is_doubled for one in found] == [True, False, False]


def test_a_row_of_the_trainers_at_temperature_1_needs_no_vocabulary() -> None:
    row, _ = row_and_output(1.0, 1.0)
    assert call_of(row, is_own=False).vocabulary_positions == 0
    assert call_of(row, is_own=True).vocabulary_positions == POSITIONS
    assert call_of(ProbeRow(row.token_ids, row.logprobs[-3:], 0.7), is_own=False).vocabulary_positions == 3


def test_of_a_sample_the_tokens_of_the_newest_version_are_compared() -> None:
    recent = RecentSamples(max_length=64)
    recent.note([5, 6], PLAIN, [completion([3, 3, 4, 4], [10, 11, 12, 13])])
    row = recent.take(4, 100)
    assert row is not None
    assert row.token_ids.tolist() == [5, 6, 10, 11, 12, 13]
    assert len(row.logprobs) == 2
    assert recent.take(4, 100) is None


def test_a_row_is_scored_by_the_policy_whose_it_is() -> None:
    recent = RecentSamples(max_length=64)
    recent.note([5, 6], replace(PLAIN, policy="solver"), [completion([3, 3])])
    row = recent.take(3, 100)
    assert row is not None
    assert call_of(row, is_own=True).sampling.policy == "solver"
    assert call_of(replace(row, policy=""), is_own=False).sampling.policy == ""


def test_a_sample_that_has_read_on_under_newer_weights_is_taken_first() -> None:
    recent = RecentSamples(max_length=64)
    recent.note([5], PLAIN, [completion([3, 4])])
    recent.note([6], PLAIN, [completion([4, 4])])
    recent.note([7], PLAIN, [completion([3, 3])])
    taken = [recent.take(4, 100) for _ in range(3)]
    assert [None if row is None else row.token_ids[0] for row in taken] == [5, 6, None]


def test_where_caches_are_kept_no_sample_that_has_read_them_is_taken() -> None:
    recent = RecentSamples(max_length=64, keeps_caches=True)
    recent.note([5], PLAIN, [completion([3, 4]), completion([4, 4, 4])])
    recent.note([6], PLAIN, [completion([3, 4])])
    row = recent.take(4, 100)
    assert row is not None
    assert len(row.logprobs) == 3
    assert recent.take(4, 100) is None


def test_samples_of_a_cut_distribution_are_not_compared() -> None:
    recent = RecentSamples(max_length=64)
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=3), Sampling(min_p=0.1), PLAIN.greedy()):
        recent.note([5], sampling, [completion([4, 4])])
    recent.note([5], PLAIN, [completion([4, 4], logprob=math.nan)])
    assert recent.take(4, 100) is None


def test_a_sample_fits_the_budget_and_leaves_room_for_a_token() -> None:
    recent = RecentSamples(max_length=6)
    recent.note([1, 2, 3], PLAIN, [completion([4] * 3)])
    assert recent.take(4, 4) is None
    row = recent.take(4, 5)
    assert row is not None
    assert (len(row.token_ids), len(row.logprobs)) == (5, 2)


def test_few_samples_are_kept() -> None:
    recent = RecentSamples(max_length=64)
    for prompt in range(amount(100) + NUM_KEPT):
        recent.note([prompt], PLAIN, [completion([4, 4])])
    num = 0
    while recent.take(4, 100) is not None:
        num += 1
    assert num == NUM_KEPT
