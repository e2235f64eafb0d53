"""The sampling distribution, by hand and by its properties."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.conf.rollout import HIGHEST_TEMPERATURE
from penstock.workers.protocols import Sampling
from penstock.workers.rollout.engine_hf import choose_tokens, draw_uniforms, sampling_logprobs
from penstock.workers.rollout.engine_vllm import samples_of_output, sampling_params
from tests.amounts import amount

LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def probabilities(sampling: Sampling, logits: torch.Tensor = LOGITS) -> list[float]:
    return sampling_logprobs(logits, sampling).exp()[0].tolist()


def test_temperature_one_is_the_model() -> None:
    assert probabilities(Sampling()) == pytest.approx([0.5, 0.25, 0.125, 0.125])


def test_half_the_temperature_squares_probabilities() -> None:
    squares = [0.25, 0.0625, 0.015625, 0.015625]
    expected = [square / sum(squares) for square in squares]
    assert probabilities(Sampling(temperature=0.5)) == pytest.approx(expected)


def test_top_k_keeps_the_k_likeliest() -> None:
    assert probabilities(Sampling(top_k=2)) == pytest.approx([2 / 3, 1 / 3, 0, 0])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert probabilities(Sampling(top_p=0.7)) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert probabilities(Sampling(top_p=0.5)) == pytest.approx([1, 0, 0, 0])
    assert probabilities(Sampling(top_p=1e-6)) == pytest.approx([1, 0, 0, 0])


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert probabilities(Sampling(min_p=0.3)) == pytest.approx([2 / 3, 1 / 3, 0, 0])


def test_greedy_takes_the_likeliest_and_reports_the_models_own_probability() -> None:
    sampling = Sampling(temperature=0.0)
    assert probabilities(sampling) == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert choose_tokens(sampling_logprobs(LOGITS, sampling), None).tolist() == [0]


@settings(max_examples=amount(60), deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    st.floats(0.1, HIGHEST_TEMPERATURE),
    st.integers(0, 6),
    st.floats(0.05, 1),
    st.floats(0, 0.5),
    st.floats(0, 1, exclude_max=True),
)
def test_a_token_that_was_truncated_away_is_never_chosen(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logprobs = sampling_logprobs(torch.tensor([values]), sampling)
    assert logprobs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert logprobs.argmax().item() in [i for i, value in enumerate(values) if value >= max(values) - 1e-6]
    token = choose_tokens(logprobs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert logprobs[0, token].item() > -math.inf


def test_uniforms_map_to_tokens_by_the_distribution_function() -> None:
    uniforms = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 0.9999999999999999], dtype=torch.float64)
    chosen = choose_tokens(sampling_logprobs(LOGITS, Sampling()).expand(6, -1), uniforms)
    assert chosen.tolist() == [0, 0, 1, 1, 2, 3]


def test_each_sample_draws_from_a_seed_of_its_own() -> None:
    three = draw_uniforms(3, 5, seed=10)
    assert torch.equal(three[1], draw_uniforms(1, 5, seed=11)[0])
    assert len({tuple(row.tolist()) for row in three}) == 3
    assert not torch.equal(draw_uniforms(1, 5, None), draw_uniforms(1, 5, None))


@pytest.mark.real
def test_vllm_is_asked_for_one_greedy_sample_which_counts_as_often_as_it_is_due() -> None:
    """With more vLLM itself refuses: n must be 1 when using greedy sampling."""
    greedy = sampling_params(3, Sampling(temperature=0.0, seed=1))
    assert (greedy.n, sampling_params(3, Sampling(temperature=0.5)).n) == (1, 3)
    assert samples_of_output(SimpleNamespace(outputs=["same"]), 3) == ["same"] * 3
    assert samples_of_output(SimpleNamespace(outputs=["a", "b", "c"]), 3) == ["a", "b", "c"]
