import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.kl import (
    ESTIMATORS,
    LOG_RATIO_BOUND,
    AdaptiveKl,
    kl_estimate,
    kl_penalty,
    log_ratio,
    sequence_log_ratio,
)
from penstock.conf.errors import ConfigError, ShapeError

LOGPROBS = st.floats(-60, 0, width=32)


def test_the_three_estimators_by_hand():
    # r = log π - log π_ref = -1 - (-1 - ln 2) = ln 2 = 0.6931
    # k1 = r; k2 = r² / 2 = 0.2402; k3 = exp(-r) - 1 + r = 0.5 - 1 + 0.6931 = 0.1931
    policy = torch.tensor([-1.0], dtype=torch.float64)
    reference = policy - math.log(2)
    assert kl_estimate(policy, reference, "k1").item() == pytest.approx(0.693147, abs=1e-6)
    assert kl_estimate(policy, reference, "k2").item() == pytest.approx(0.240227, abs=1e-6)
    assert kl_estimate(policy, reference, "k3").item() == pytest.approx(0.193147, abs=1e-6)


@given(LOGPROBS, LOGPROBS)
def test_k2_and_k3_are_never_negative(policy, reference):
    for estimator in ("k2", "k3"):
        assert kl_estimate(torch.tensor([policy]), torch.tensor([reference]), estimator).item() >= -1e-12


@given(LOGPROBS, st.sampled_from(ESTIMATORS))
def test_equal_models_have_exactly_no_divergence(logprob, estimator):
    assert kl_estimate(torch.tensor([logprob]), torch.tensor([logprob]), estimator).item() == 0.0


def test_k3_keeps_its_digits_where_the_two_nearly_agree():
    # k3(r) = r² / 2 - r³ / 6 + …: 5e-9 for r = 1e-4, which exp(-r) - 1 + r in float32 would lose altogether
    result = kl_estimate(torch.tensor([0.0]), torch.tensor([-1e-4]), "k3")
    assert result.item() == pytest.approx(5e-9, rel=1e-2)


def test_k1_and_k3_are_unbiased():
    # exact expectations over a distribution of three tokens
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        mean = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
        torch.testing.assert_close(mean, exact)


def test_the_gradient_of_k3_is_one_minus_the_inverse_ratio():
    # d/dlogπ (exp(-r) - 1 + r) = 1 - exp(-r) = 1 - 1/2 at r = ln 2
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    kl_estimate(policy, policy.detach() - math.log(2), "k3").backward()
    assert policy.grad.item() == pytest.approx(0.5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("r", [-100.0, 100.0])
def test_a_log_ratio_of_100_gives_finite_values_and_no_gradient(estimator, r):
    policy = torch.tensor([r], requires_grad=True)
    estimate = kl_estimate(policy, torch.zeros(1), estimator)
    estimate.backward()
    assert estimate.isfinite().all()
    assert policy.grad.item() == 0.0


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"reference_logprobs is float32 \[3\]; expected \[2\]"):
        kl_estimate(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ConfigError, match="estimator=k4: unknown"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")
    with pytest.raises(ConfigError, match="kl_coef=-1"):
        kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), coef=-1)
    with pytest.raises(ShapeError, match=r"logprobs is float32 \[2\]; expected a tensor \[B, T\]"):
        kl_penalty(torch.zeros(2), torch.zeros(2), torch.ones(2), coef=1)
    with pytest.raises(ShapeError, match=r"mask is float32 \[1, 3\]; expected \[1, 2\]"):
        kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 3), coef=1)
    with pytest.raises(ShapeError, match=r"kl_coef is float32 \[3\]; expected \[1\], the shape of logprobs' rows"):
        kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), coef=torch.ones(3))
    with pytest.raises(ConfigError, match="kl_coef=-1"):
        AdaptiveKl(-1, target=1)
    with pytest.raises(ConfigError, match="kl_target=0"):
        AdaptiveKl(0.1, target=0)
    with pytest.raises(ConfigError, match="kl_gain=-1"):
        AdaptiveKl(0.1, target=1, gain=-1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_k2(estimator):
    # the gradient of k2 is r = ln 2
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = policy.detach() - math.log(2)
    estimate = kl_estimate(policy, reference, f"{estimator}_st")
    estimate.backward()
    assert estimate.item() == kl_estimate(policy.detach(), reference, estimator).item()
    assert policy.grad.item() == pytest.approx(math.log(2))


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_on_policy_the_expected_gradient_of_k2_alone_is_that_of_the_divergence(logits):
    # exact expectations over three tokens: sum π(y) · grad of k(y), against autograd on the divergence itself
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits, retain_graph=True)[0]
    nothing = torch.zeros(3, dtype=torch.float64)
    expectations = {"k1": nothing, "k2": exact, "k3": reverse, "k1_st": exact, "k3_st": exact}
    for estimator, expected in expectations.items():
        estimate = (policy.detach().exp() * kl_estimate(policy, reference, estimator)).sum()
        gradient = torch.autograd.grad(estimate, logits, retain_graph=True)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10)


def test_the_penalty_is_the_scaled_log_ratio_without_gradient_zero_in_padding():
    # 0.1 · (-1 + 2) = 0.1
    logprobs = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([[-2.0, math.nan]]), torch.tensor([[1, 0]]), coef=0.1)
    torch.testing.assert_close(penalty, torch.tensor([[0.1, 0.0]]))
    assert not penalty.requires_grad


def test_a_coefficient_may_be_of_the_row():
    logprobs, reference = torch.zeros(2, 2), -torch.ones(2, 2)
    penalty = kl_penalty(logprobs, reference, torch.tensor([[1, 1], [1, 0]]), coef=torch.tensor([0.5, 2.0]))
    assert penalty.tolist() == [[0.5, 0.5], [2.0, 0.0]]


def test_the_sum_of_k1_penalties_is_the_log_ratio_of_the_responses():
    logprobs, reference = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.5, -1.0, -2.0]])
    penalty = kl_penalty(logprobs, reference, torch.ones(1, 3), coef=1.0)
    assert penalty.sum().item() == pytest.approx((logprobs - reference).sum().item())


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.101),  # e = 0.1: 0.1 · (1 + 0.1 · 0.1)
        (12.0, 0.102),  # e = 1, clipped to 0.2
        (0.0, 0.098),  # e = -1, clipped to -0.2
        (math.inf, 0.102),
        (math.nan, 0.1),  # a step that cannot say moves nothing
    ],
)
def test_an_adaptive_coefficient_follows_its_target_by_at_most_a_fiftieth(kl, coef):
    assert AdaptiveKl(coef=0.1, target=6.0).after(kl).coef == pytest.approx(coef)


def test_a_controller_says_what_it_saw_and_where_it_goes():
    state = AdaptiveKl(coef=0.1, target=6.0).after(12.0)
    assert state.metrics == {"kl_coef": pytest.approx(0.102), "response_kl": 12.0}


@given(st.lists(st.floats(0, 1e6), max_size=30))
def test_an_adaptive_coefficient_stays_positive_and_its_states_replay(divergences):
    def run():
        state = AdaptiveKl(coef=0.1, target=6.0)
        for kl in divergences:
            state = state.after(kl)
        return state

    assert run() == run()
    assert run().coef > 0


MASK = torch.tensor([[True, True, False], [False, False, False]])


def test_log_ratios_are_clamped_and_in_float32():
    result = log_ratio(torch.tensor([1.0, 50.0, -50.0], dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16))
    assert result.tolist() == [1.0, LOG_RATIO_BOUND, -LOG_RATIO_BOUND]
    assert result.dtype == torch.float32


def test_of_a_response_the_ratio_is_the_product_or_its_root():
    # ratios 4 and 1: product 4, geometric mean (4 · 1)^(1/2) = 2; a row without a token has ratio 1
    new = torch.tensor([[math.log(4), 0.0, 0.0], [0.0, 0.0, 0.0]])
    product = sequence_log_ratio(new, torch.zeros(2, 3), MASK, "product").exp()
    torch.testing.assert_close(product, torch.tensor([[4.0], [1.0]]))
    geometric = sequence_log_ratio(new, torch.zeros(2, 3), MASK).exp()
    torch.testing.assert_close(geometric, torch.tensor([[2.0], [1.0]]))


def test_one_token_far_off_counts_with_what_it_is_and_the_result_is_clamped():
    new = torch.tensor([[30.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert sequence_log_ratio(new, torch.zeros(2, 3), MASK)[0].item() == 15.0  # 30 / 2, not 20 / 2
    assert sequence_log_ratio(new, torch.zeros(2, 3), MASK, "product")[0].item() == LOG_RATIO_BOUND


@given(st.floats(-5, 5, width=32), st.integers(1, 7))
def test_the_geometric_mean_does_not_depend_on_the_length(log_rho, length):
    new, mask = torch.full((1, length), log_rho, dtype=torch.float64), torch.ones(1, length, dtype=torch.bool)
    assert sequence_log_ratio(new, torch.zeros_like(new), mask).item() == pytest.approx(log_rho)


def test_an_unknown_kind_is_named():
    with pytest.raises(ConfigError, match="ratio=geo: unknown; did you mean 'geometric'"):
        sequence_log_ratio(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "geo")
