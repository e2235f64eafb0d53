import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.kl import ESTIMATORS, LOG_RATIO_BOUND, kl_estimate, log_ratio
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


def test_log_ratios_are_clamped_and_in_float32():
    result = log_ratio(torch.tensor([1.0, 50.0, -50.0], dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16))
    assert result.tolist() == [1.0, LOG_RATIO_BOUND, -LOG_RATIO_BOUND]
    assert result.dtype == torch.float32


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"reference_logprobs is float32 \[3\]; expected \[2\]"):
        kl_estimate(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ConfigError, match="estimator=k4: unknown"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")
