import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals, aggregate, in_float32, masked
from penstock.conf.algorithms import AGGREGATIONS
from penstock.conf.errors import ConfigError, ShapeError

VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, float("nan"), float("inf")]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])


def test_token_mean_weighs_every_token_the_same():
    # (1 + 2 + 3 + 10) / 4 tokens = 4
    assert aggregate(VALUES, MASK, BatchTotals.of(MASK), "token_mean").item() == 4.0


def test_sequence_mean_weighs_every_response_the_same():
    # ((1 + 2 + 3) / 3 + 10 / 1) / 2 responses = (2 + 10) / 2 = 6
    assert aggregate(VALUES, MASK, BatchTotals.of(MASK), "sequence_mean").item() == 6.0


def test_sequence_sum_is_the_mean_of_the_sums():
    # ((1 + 2 + 3) + 10) / 2 responses = 8
    assert aggregate(VALUES, MASK, BatchTotals.of(MASK), "sequence_sum").item() == 8.0


def test_constant_divides_the_sums_by_a_length_that_is_the_same_for_all():
    # ((1 + 2 + 3) + 10) / (2 responses · 4) = 2
    assert aggregate(VALUES, MASK, BatchTotals.of(MASK), "constant", constant=4).item() == 2.0
    assert aggregate(VALUES, MASK, BatchTotals.of(MASK), "constant").item() == 8.0


def test_groups_are_summed_and_not_counted_from_a_mask():
    assert BatchTotals(1, 1, 2) + BatchTotals(3, 1, 4) == BatchTotals(4, 2, 6)
    assert BatchTotals.of(MASK).num_groups == 0


def test_the_normaliser_is_of_the_whole_batch_not_of_the_call():
    # 16 over the 8 tokens of a batch of which this is one half
    assert aggregate(VALUES, MASK, BatchTotals(8, 4), "token_mean").item() == 2.0
    assert aggregate(VALUES, MASK, BatchTotals(8, 4), "sequence_mean").item() == 3.0


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_rows_without_a_token_add_nothing(how):
    padded = torch.cat([VALUES, torch.full((2, 3), float("nan"))])
    mask = torch.cat([MASK, torch.zeros(2, 3, dtype=MASK.dtype)])
    assert BatchTotals.of(mask) == BatchTotals.of(MASK)
    assert aggregate(padded, mask, BatchTotals.of(mask), how) == aggregate(VALUES, MASK, BatchTotals.of(MASK), how)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_batch_without_a_token_is_zero_and_still_has_a_gradient(how):
    values = torch.ones(2, 3, requires_grad=True)
    result = aggregate(values, torch.zeros(2, 3), BatchTotals(0, 0), how)
    result.backward()
    assert result.item() == 0.0
    assert values.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_rows_of_no_width_are_fine(how):
    assert aggregate(torch.zeros(2, 0), torch.zeros(2, 0), BatchTotals(4, 2), how).item() == 0.0


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_the_gradient_of_padding_is_exactly_zero(how):
    values = VALUES.clone().requires_grad_()
    aggregate(values, MASK, BatchTotals.of(MASK), how).backward()
    assert values.grad[1, 1:].tolist() == [0.0, 0.0]
    assert values.grad[1, 0] > 0


@given(st.integers(0, 2**16), st.integers(1, 6), st.integers(1, 7), st.sampled_from(AGGREGATIONS), st.data())
def test_contributions_of_any_split_add_up_to_the_whole(seed, rows, width, how, data):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    totals = BatchTotals.of(mask)
    whole = aggregate(values, mask, totals, how)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    order = torch.randperm(rows, generator=generator)
    parts = torch.tensor_split(order, cuts)
    split = sum(aggregate(values[part], mask[part], totals, how) for part in parts)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    assert sum((BatchTotals.of(mask[part]) for part in parts), BatchTotals(0, 0)) == totals


def test_half_precision_is_summed_in_float32():
    # 4096 ones in bfloat16 would stop at 256
    values = torch.ones(1, 4096, dtype=torch.bfloat16)
    result = aggregate(values, torch.ones(1, 4096), BatchTotals(1, 1), "token_mean")
    assert result.dtype == torch.float32
    assert result.item() == 4096.0


def test_float64_stays_float64():
    assert in_float32(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert in_float32(torch.ones(1, dtype=torch.int32)).dtype == torch.float32


def test_masked_keeps_nan_out_of_the_gradient_of_what_follows():
    values = torch.tensor([0.0, float("nan")], requires_grad=True)
    masked(values, torch.tensor([True, False])).exp().sum().backward()
    assert values.grad.tolist() == [1.0, 0.0]


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"mask is float32 \[2, 2\]; expected \[2, 3\], the shape of values"):
        aggregate(torch.zeros(2, 3), torch.zeros(2, 2), BatchTotals(1, 1), "token_mean")
    with pytest.raises(ShapeError, match=r"values is float32 \[3\]; expected a tensor \[B, T\]"):
        aggregate(torch.zeros(3), torch.zeros(3), BatchTotals(1, 1), "token_mean")
    with pytest.raises(ShapeError, match=r"mask is float32 .* values other than 0 and 1"):
        aggregate(torch.zeros(1, 2), torch.tensor([[0.5, 1.0]]), BatchTotals(1, 1), "token_mean")
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        aggregate(torch.zeros(1, 2), torch.ones(1, 2), BatchTotals(1, 1), "token_means")
    with pytest.raises(ConfigError, match=r"totals.num_tokens=-1"):
        BatchTotals(-1, 1)
    with pytest.raises(ConfigError, match=r"totals.num_groups=-1"):
        BatchTotals(1, 1, -1)
    with pytest.raises(ConfigError, match=r"constant=0: must be a finite number, above 0"):
        aggregate(torch.zeros(1, 2), torch.ones(1, 2), BatchTotals(1, 1), "constant", constant=0)
    with pytest.raises(ShapeError, match="values is list"):
        aggregate([[1.0]], torch.ones(1, 1), BatchTotals(1, 1), "token_mean")
