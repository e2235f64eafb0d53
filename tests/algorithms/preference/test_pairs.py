import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses.preference import (
    Pairs,
    mean_logprobs,
    response_mask,
    sequence_logprobs,
    token_log_ratios,
)
from penstock.conf.errors import ConfigError, ShapeError
from tests.algorithms.preference.batches import random_batch

LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-10.0, float("nan"), float("inf")], [float("nan")] * 3])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def totals(num_groups):
    return BatchTotals(0, 0, num_groups)


def test_rows_are_paired_by_group_in_ascending_order_of_it():
    # group 3: rows 1 (chosen) and 4; group 8: rows 2 (chosen) and 0; row 3 of group 8 takes no part
    preferred, group_ids = torch.tensor([-1, 1, 1, 0, -1]), torch.tensor([8, 3, 8, 8, 3])
    pairs = Pairs.of(preferred, group_ids, totals(2))
    assert pairs.chosen_P.tolist() == [1, 2]
    assert pairs.rejected_P.tolist() == [4, 0]
    chosen, rejected = pairs.split(torch.tensor([0.0, 10.0, 20.0, 30.0, 40.0]))
    assert (chosen.tolist(), rejected.tolist()) == ([10.0, 20.0], [40.0, 0.0])


@given(st.integers(0, 2**16), st.integers(0, 6))
def test_every_pair_is_one_chosen_and_one_rejected_row_of_one_group(seed, num_groups):
    columns = random_batch(seed, num_groups, 1).columns
    preferred, group_ids = columns["preferred"], columns["group_ids"]
    pairs = Pairs.of(preferred, group_ids, totals(num_groups))
    assert torch.equal(group_ids[pairs.chosen_P], group_ids[pairs.rejected_P])
    assert (group_ids[pairs.chosen_P].diff() > 0).all()
    assert sorted(pairs.chosen_P.tolist()) == (preferred == 1).nonzero().squeeze(-1).tolist()
    assert sorted(pairs.rejected_P.tolist()) == (preferred == -1).nonzero().squeeze(-1).tolist()


def test_ids_beyond_what_float32_can_tell_apart_are_different_groups():
    # 2^53 + 1 is no float64 either
    group_ids = torch.tensor([2**53, 2**53, 2**53 + 1, 2**53 + 1])
    pairs = Pairs.of(torch.tensor([1.0, -1.0, -1.0, 1.0]), group_ids, totals(2))
    assert (pairs.chosen_P.tolist(), pairs.rejected_P.tolist()) == ([0, 3], [1, 2])


def test_groups_without_a_pair_count_in_the_mean_and_in_the_metrics():
    # one pair in four groups: margin 3 - 1 = 2, a mean of 0.5
    pairs = Pairs.of(torch.tensor([1.0, -1.0, 0.0]), torch.tensor([0, 0, 1]), totals(4))
    metrics = pairs.metrics(torch.tensor(9.0), torch.tensor([3.0]), torch.tensor([1.0]))
    assert {name: value.item() for name, value in metrics.items()} == {
        "loss": 9.0,
        "accuracy": 0.25,
        "margin": 0.5,
        "chosen_reward": 0.75,
        "rejected_reward": 0.25,
        "pair_fraction": 0.25,
    }


def test_a_margin_of_zero_is_not_accurate():
    pairs = Pairs.of(torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), totals(1))
    assert pairs.metrics(torch.tensor(0.0), torch.tensor([1.0]), torch.tensor([1.0]))["accuracy"] == 0.0


def test_no_rows_are_no_pairs():
    pairs = Pairs.of(torch.zeros(0), torch.zeros(0, dtype=torch.int64), totals(0))
    assert pairs.mean(torch.zeros(0)).item() == 0.0


def test_splitting_passes_the_gradient_on():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    chosen, rejected = Pairs.of(torch.tensor([0, -1, 1]), torch.tensor([0, 0, 0]), totals(1)).split(values)
    (5 * chosen.sum() + 7 * rejected.sum()).backward()
    assert values.grad.tolist() == [0.0, 7.0, 5.0]


def test_sequences_are_summed_and_averaged_over_their_tokens_alone():
    # row 0: -1 - 2 - 3 = -6 over 3 tokens; row 1: -10 over 1; row 2 has none
    assert sequence_logprobs(LOGPROBS, MASK).tolist() == [-6.0, -10.0, 0.0]
    assert mean_logprobs(LOGPROBS, MASK).tolist() == [-2.0, -10.0, 0.0]


def test_what_lies_under_padding_has_no_gradient():
    logprobs = LOGPROBS.clone().requires_grad_()
    mean_logprobs(logprobs, MASK).sum().backward()
    assert logprobs.grad.tolist() == [[pytest.approx(1 / 3)] * 3, [1.0, 0.0, 0.0], [0.0] * 3]


def test_half_precision_is_summed_in_float32():
    # 4096 ones in bfloat16 would stop at 256
    result = sequence_logprobs(torch.ones(1, 4096, dtype=torch.bfloat16), torch.ones(1, 4096, dtype=torch.bool))
    assert (result.dtype, result.item()) == (torch.float32, 4096.0)


def test_log_ratios_in_half_precision_are_subtracted_in_float32():
    # 127.75 has nine significant bits; bfloat16 has eight
    logprobs, reference = torch.tensor([[-0.25], [-128.0]], dtype=torch.bfloat16).split(1)
    assert token_log_ratios(logprobs, reference, torch.ones(1, 1, dtype=torch.bool)).item() == 127.75


def test_log_ratios_of_long_sequences_keep_their_digits():
    # 20,000 tokens of ratio 2^-12: 4.8828125; sums of the log-probabilities, around -2e5, are 1/64 apart in float32
    logprobs = torch.full((1, 20_000), -10.0)
    ratios = token_log_ratios(logprobs, logprobs - 2**-12, torch.ones(1, 20_000, dtype=torch.bool))
    assert sequence_logprobs(ratios, torch.ones(1, 20_000, dtype=torch.bool)).item() == pytest.approx(4.8828125)


@pytest.mark.parametrize(
    ("preferred", "message"),
    [
        ([1, 1, -1, 0], r"group 4 has 2 chosen \(\+1\) and 1 rejected \(-1\) rows; expected one of each, or 0 for all"),
        ([1, -1, -1, 0], r"group 4 has 1 chosen \(\+1\) and 2 rejected"),
        ([1, 0, 0, 0], r"group 4 has 1 chosen \(\+1\) and 0 rejected"),
        ([0, -1, 0, 0], r"group 4 has 0 chosen \(\+1\) and 1 rejected"),
        ([0, 0, 0, 1], r"preferred is int64 \[4\], and group 6 has 1 chosen \(\+1\) and 0 rejected"),
        ([1, 2, -1, 0], r"preferred is int64 \[4\] with 2.0 at row 1; expected \+1, -1 or 0"),
        ([0.0, 0.0, 0.5, 0.0], r"preferred is float32 \[4\] with 0.5 at row 2; expected \+1, -1 or 0"),
        ([0.0, float("nan"), 0.0, 0.0], r"with nan at row 1"),
    ],
)
def test_a_group_that_is_no_pair_is_named(preferred, message):
    with pytest.raises(ShapeError, match=message):
        Pairs.of(torch.tensor(preferred), torch.tensor([4, 4, 4, 6]), totals(2))


def test_two_pairs_in_one_group_are_refused():
    with pytest.raises(ShapeError, match=r"group 4 has 2 chosen \(\+1\) and 2 rejected \(-1\) rows"):
        Pairs.of(torch.tensor([1, 1, -1, -1]), torch.tensor([4, 4, 4, 4]), totals(1))


def test_bad_input_is_named():
    preferred, group_ids = torch.tensor([1.0, -1.0]), torch.tensor([0, 0])
    with pytest.raises(ShapeError, match=r"preferred is float32 \[1, 2\]; expected a tensor \[B\]"):
        Pairs.of(preferred[None], group_ids, totals(1))
    with pytest.raises(ShapeError, match=r"group_ids is int64 \[1\]; expected \[2\], one value a row"):
        Pairs.of(preferred, group_ids[:1], totals(1))
    with pytest.raises(ShapeError, match=r"group_ids is list; expected \[2\], one value a row"):
        Pairs.of(preferred, [0, 0], totals(1))
    for dtype in ("float32", "bool"):
        with pytest.raises(ShapeError, match=rf"group_ids is {dtype} \[2\]; expected integers, e.g. int64"):
            Pairs.of(preferred, group_ids.to(getattr(torch, dtype)), totals(1))
    with pytest.raises(ShapeError, match=r"totals.num_groups is 0, but this micro-batch alone has 1; expected the gro"):
        Pairs.of(preferred, group_ids, BatchTotals(4, 2))
    with pytest.raises(ConfigError, match=r"totals.num_groups=-1: must be a finite number, at least 0"):
        totals(-1)
    with pytest.raises(ShapeError, match=r"mask is bool \[3, 3\]; expected \[2, 3\], the shape of logprobs"):
        response_mask(LOGPROBS[:2], MASK)


def test_totals_add_up_their_groups():
    assert BatchTotals(1, 2, 3) + BatchTotals(10, 20, 30) == BatchTotals(11, 22, 33)
