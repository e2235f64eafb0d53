import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.kl import LOG_RATIO_BOUND, log_ratio, sequence_log_ratio
from penstock.conf.errors import ConfigError

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
