import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import explained_variance, value_loss
from penstock.conf.errors import ConfigError, ShapeError

ONE = BatchTotals(1, 1)


def one(value, returns, old_value, **settings):
    value = torch.tensor([[value]], requires_grad=True)
    others = torch.tensor([[returns]]), torch.tensor([[old_value]])
    loss, metrics = value_loss(value, torch.ones(1, 1), ONE, *others, **settings)
    loss.backward()
    return loss.item(), value.grad.item(), metrics["value_clip_fraction"].item()


@pytest.mark.parametrize(
    ("value", "returns", "old_value", "expected"),
    [
        (1.0, 3.0, 0.5, (2.645, 0.0, 1.0)),  # clipped to 0.7: 2.3² / 2 is above 2² / 2, no gradient
        (0.6, 3.0, 0.5, (2.88, -2.4, 0.0)),  # within the clip: 2.4² / 2, gradient V - R
        (1.0, 0.0, 0.5, (0.5, 1.0, 0.0)),  # 0.7² is below 1²: the plain error counts
        (3.0, 3.0, 3.0, (0.0, 0.0, 0.0)),
    ],
)
def test_the_clipped_error_by_hand(value, returns, old_value, expected):
    assert one(value, returns, old_value, clip=0.2) == pytest.approx(expected)


def test_an_infinite_clip_is_half_the_squared_error():
    assert one(1.0, 3.0, -50.0, clip=math.inf) == (2.0, -2.0, 0.0)


@given(st.integers(0, 2**16), st.integers(0, 4), st.sampled_from(["token_mean", "sequence_mean", "constant"]))
def test_contributions_of_micro_batches_add_up_and_padding_is_nothing(seed, cut, how):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=generator) < 0.6
    columns = [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    soiled = [torch.where(mask, column, math.nan) for column in columns]
    totals = BatchTotals.of(mask)

    def run(values, returns, old_values, mask):
        return value_loss(values, mask, totals, returns, old_values, aggregation=how, constant=3.0)

    whole, metrics = run(*columns, mask)
    parts = [run(*(column[part] for column in soiled), mask[part]) for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    for name, value in metrics.items():
        torch.testing.assert_close(
            parts[0][1][name] + parts[1][1][name], value, check_dtype=False, atol=1e-6, rtol=1e-5
        )


def test_only_the_values_get_a_gradient():
    tensors = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    loss, metrics = value_loss(tensors[0], torch.ones(2, 3), BatchTotals(6, 2), tensors[1], tensors[2])
    loss.backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None
    assert not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    # 300² overflows float16
    loss, _ = value_loss(*(torch.tensor([[300.0]], dtype=dtype), torch.ones(1, 1), ONE), *[torch.zeros(1, 1)] * 2)
    assert loss.item() == 45000.0


def test_explained_variance_by_hand():
    # returns 1 and 3, errors 0 and 1: variances 1 and 0.25
    values, returns = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    _, metrics = value_loss(values, torch.ones(1, 2), BatchTotals(2, 1), returns, values)
    assert explained_variance({name: value.item() for name, value in metrics.items()}) == pytest.approx(0.75)


def test_a_perfect_critic_explains_all_and_equal_returns_need_no_explanation():
    returns = torch.tensor([[1.0, 3.0]])
    _, metrics = value_loss(returns, torch.ones(1, 2), BatchTotals(2, 1), returns, returns)
    assert explained_variance({name: value.item() for name, value in metrics.items()}) == 1.0
    _, metrics = value_loss(returns, torch.ones(1, 2), BatchTotals(2, 1), torch.ones(1, 2), returns)
    assert math.isnan(explained_variance({name: value.item() for name, value in metrics.items()}))


@given(st.integers(0, 2**16), st.integers(1, 5), st.floats(-100, 100))
def test_explained_variance_does_not_depend_on_the_cut_into_micro_batches(seed, rows, offset):
    generator = torch.Generator().manual_seed(seed)
    values, returns = (torch.randn(rows, 6, generator=generator, dtype=torch.float64) + offset for _ in range(2))
    mask = torch.rand(rows, 6, generator=generator) < 0.7
    mask[0, :2] = True
    totals, sums = BatchTotals.of(mask), {}
    for row in torch.arange(rows).split(2):
        _, metrics = value_loss(values[row], mask[row], totals, returns[row], values[row])
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    expected = 1 - (returns - values)[mask].var(correction=0) / returns[mask].var(correction=0)
    assert explained_variance(sums) == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)


@given(st.floats(-1e3, 1e3, width=32), st.integers(1, 50))
def test_equal_returns_are_seen_as_equal_whatever_their_size(value, tokens):
    returns = torch.full((1, tokens), value)
    _, metrics = value_loss(torch.zeros(1, tokens), torch.ones(1, tokens), BatchTotals(tokens, 1), returns, returns)
    assert math.isnan(explained_variance({name: value.item() for name, value in metrics.items()}))


def test_bad_input_is_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"algorithm.value_clip=-1: must be at least 0"):
        value_loss(x, x, ONE, x, x, clip=-1)
    with pytest.raises(ConfigError, match="value_clip=nan"):
        value_loss(x, x, ONE, x, x, clip=math.nan)
    with pytest.raises(ShapeError, match=r"returns is float32 \[2, 2\]; expected \[2, 3\], the shape of values"):
        value_loss(x, x, ONE, x[:, :2], x)
    with pytest.raises(ShapeError, match="old_values is NoneType"):
        value_loss(x, x, ONE, x, None)
