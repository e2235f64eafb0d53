import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals, aggregate
from penstock.algorithms.losses import SURROGATES
from tests.algorithms.losses.formula import tokens

LN4 = math.log(4)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_the_ratio_of_a_response_is_the_root_of_the_product(name):
    # s = (4 · 1)^(1/2) = 2; L = -2; each token has half of dL/ds · s = -2, and of the mean over two tokens
    values, gradient, metrics = tokens(name, [LN4 - 1, -1.0], [-1.0, -1.0], [1.0, 1.0], clip_high=1.5)
    assert values == pytest.approx([-2.0, -2.0])
    assert gradient == pytest.approx([-1.0, -1.0])
    assert metrics["clip_fraction"] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_a_response_is_clipped_as_a_whole(name):
    # s = 2 is above 1.5
    values, gradient, metrics = tokens(name, [LN4 - 1, -1.0], [-1.0, -1.0], [1.0, 1.0], clip_high=0.5)
    assert values == pytest.approx([-1.5, -1.5])
    assert gradient == [0.0, 0.0]
    assert metrics["clip_fraction"] == [1.0, 1.0]


@given(st.integers(0, 2**16), st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"]))
def test_with_one_advantage_a_response_gspo_and_gspo_token_agree(seed, how):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=generator) < 0.7
    new, old = (torch.where(mask, -torch.rand(4, 5, generator=generator).double(), 0.0) for _ in range(2))
    advantage = torch.randn(4, 1, generator=generator).double().expand(4, 5)
    results = []
    for name in ("gspo", "gspo_token"):
        leaf = new.clone().requires_grad_()
        values, _ = SURROGATES[name](torch.where(mask, leaf, 0.0), old, advantage, mask, clip_low=0.1, clip_high=0.1)
        loss = aggregate(values, mask, BatchTotals.of(mask), how)
        results.append((loss, torch.autograd.grad(loss, leaf)[0]))
    torch.testing.assert_close(results[0], results[1])


def test_gspo_token_gives_every_token_its_own_advantage():
    # s = 1: gradients -A_t / 2 tokens; plain gspo spreads the mean of both
    assert tokens("gspo_token", [-1.0, -1.0], [-1.0, -1.0], [2.0, 4.0])[1] == [-1.0, -2.0]
    assert tokens("gspo", [-1.0, -1.0], [-1.0, -1.0], [2.0, 4.0])[1] == [-1.5, -1.5]


def test_the_geometric_mean_of_clipped_ratios_of_a_good_response():
    # log-ratios 0.2 and 1, clipped at 0.4: L = -2 · e^0.3; the clipped token has no gradient, the other L / 2
    values, gradient, metrics = tokens("gmpo", [-0.8, 0.0], [-1.0, -1.0], [2.0, 2.0])
    assert values == pytest.approx([-2 * math.exp(0.3)] * 2)
    assert gradient == pytest.approx([-math.exp(0.3), 0.0])
    assert metrics["clip_fraction"] == [0.0, 1.0]


def test_the_geometric_mean_of_clipped_ratios_of_a_bad_response():
    # A < 0 is clipped on the other side only: -1 becomes -0.4, and 1 stays; L = 2 · e^0.3
    values, gradient, metrics = tokens("gmpo", [-2.0, 0.0], [-1.0, -1.0], [-2.0, -2.0])
    assert values == pytest.approx([2 * math.exp(0.3)] * 2)
    assert gradient == pytest.approx([0.0, math.exp(0.3)])
    assert metrics["clip_fraction"] == [1.0, 0.0]


def test_either_bound_of_the_geometric_mean_is_its_own():
    # a good token is cut at +0.3, a bad one at -0.1
    for log_ratio, advantage, expected in ((1.0, 1.0, 0.3), (-1.0, 1.0, -1.0), (-1.0, -1.0, -0.1), (1.0, -1.0, 1.0)):
        value = tokens("gmpo", [log_ratio], [0.0], [advantage], clip_low=0.1, clip_high=0.3)[0][0]
        assert value == pytest.approx(-advantage * math.exp(expected))


def test_tokens_of_different_advantage_share_their_mean():
    # A = (1 + 3) / 2, ratio 1
    assert tokens("gmpo", [-1.0, -1.0], [-1.0, -1.0], [1.0, 3.0])[0] == [-2.0, -2.0]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.floats(-4, 4))
def test_the_geometric_mean_is_never_above_the_arithmetic_one(log_ratios, advantage):
    # where nothing is clipped, gmpo's exp of a mean against the mean of exp: Jensen
    old = [0.0] * len(log_ratios)
    value = tokens("gmpo", log_ratios, old, [advantage] * len(old), clip_low=10.0, clip_high=10.0)[0][0]
    arithmetic = sum(math.exp(x) for x in log_ratios) / len(old)
    assert abs(value) <= abs(advantage) * arithmetic * (1 + 1e-9)
