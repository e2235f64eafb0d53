import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses.policy import interpolated_logprobs


def test_the_older_a_token_the_nearer_the_proximal_policy_is_to_the_current_one():
    # -1 + (-2 + 1) / d
    new, behavior = torch.full((1, 4), -1.0), torch.full((1, 4), -2.0)
    result = interpolated_logprobs(new, behavior, torch.tensor([[0, 1, 2, 4]]))
    assert result.tolist() == [[-1.0, -2.0, -1.5, -1.25]]


def test_staleness_may_be_of_the_row():
    new, behavior = torch.full((2, 2), -1.0), torch.full((2, 2), -2.0)
    assert interpolated_logprobs(new, behavior, torch.tensor([1, 2])).tolist() == [[-2.0, -2.0], [-1.5, -1.5]]


@given(st.floats(-5, 0, width=32), st.floats(-5, 0, width=32), st.integers(0, 50))
def test_it_lies_between_the_two_and_carries_no_gradient(new, behavior, staleness):
    current = torch.tensor([[new]], requires_grad=True)
    result = interpolated_logprobs(current, torch.tensor([[behavior]]), torch.tensor([staleness]))
    assert not result.requires_grad
    assert min(new, behavior) - 1e-6 <= result.item() <= max(new, behavior) + 1e-6


def test_what_staleness_has_in_padding_does_not_matter():
    result = interpolated_logprobs(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, math.nan]]))
    assert result.tolist() == [[0.0, 0.0]]
