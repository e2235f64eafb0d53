import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses.preference import bradley_terry_loss
from penstock.conf.errors import ConfigError, ShapeError
from tests.algorithms.preference.batches import close, random_batch

SEED, NUM_GROUPS = st.integers(0, 2**16), st.integers(1, 6)
LOSS = st.builds(partial, st.just(bradley_terry_loss), centering_coef=st.sampled_from([0.0, 0.1]))


def one_pair(chosen, rejected, dtype=torch.float64, **settings):
    scores = torch.tensor([rejected, chosen], dtype=dtype, requires_grad=True)
    loss, metrics = bradley_terry_loss(
        scores, BatchTotals(0, 0, 1), torch.tensor([-1.0, 1.0]), torch.tensor([3, 3]), **settings
    )
    loss.backward()
    rejected_gradient, chosen_gradient = scores.grad.tolist()
    return loss.item(), (chosen_gradient, rejected_gradient), {name: value.item() for name, value in metrics.items()}


def scored(seed, num_groups, rows=None):
    """Scores, preferences, group ids and margins of random groups."""
    batch = random_batch(seed, num_groups, 1)
    generator = torch.Generator().manual_seed(seed)
    size = len(batch.mask)
    scores, margin = torch.randn(2, size, generator=generator, dtype=torch.float64)
    columns = (scores, batch.columns["preferred"], batch.columns["group_ids"], margin)
    return columns if rows is None else tuple(column[rows] for column in columns)


def run(loss, scores, preferred, group_ids, margin, num_groups):
    scores = scores.clone().requires_grad_()
    value, metrics = loss(scores, BatchTotals(0, 0, num_groups), preferred, group_ids, margin)
    value.backward()
    return value.detach(), scores.grad, metrics


def test_bradley_terry_by_hand():
    # -log σ(1 + 0.5) = log(1 + e^-1.5) = 0.201413; gradient ∓σ(-1.5) = ∓0.182426
    loss, gradient, metrics = one_pair(1.0, -0.5)
    assert loss == pytest.approx(0.201413, abs=1e-6)
    assert gradient == pytest.approx((-0.182426, 0.182426), abs=1e-6)
    assert metrics == pytest.approx(
        {
            "loss": 0.201413,
            "accuracy": 1.0,
            "margin": 1.5,
            "chosen_reward": 1.0,
            "rejected_reward": -0.5,
            "pair_fraction": 1.0,
        },
        abs=1e-6,
    )


def test_the_margin_is_that_of_the_chosen_row():
    # -log σ(1.5 - 0.5) = log(1 + e^-1) = 0.313262; the rejected row's 70 does not matter, nor does NaN
    for other in (70.0, math.nan):
        loss, _, metrics = one_pair(1.0, -0.5, margin=torch.tensor([other, 0.5]))
        assert loss == pytest.approx(0.313262, abs=1e-6)
        assert metrics["margin"] == 1.5


def test_centering_by_hand():
    # 0.201413 + 0.1 · (1 - 0.5)² = 0.226413; gradient + 0.1 · 2 · 0.5 = 0.1 on both
    loss, gradient, _ = one_pair(1.0, -0.5, centering_coef=0.1)
    assert loss == pytest.approx(0.226413, abs=1e-6)
    assert gradient == pytest.approx((-0.082426, 0.282426), abs=1e-6)


@given(st.floats(-100, 100))
def test_equal_scores_cost_log_2(score):
    loss, _, metrics = one_pair(score, score)
    assert loss == pytest.approx(math.log(2))
    assert metrics["accuracy"] == 0.0


@given(SEED, NUM_GROUPS, st.floats(-10, 10))
def test_the_likelihood_leaves_the_level_of_scores_free_and_centering_does_not(seed, num_groups, shift):
    scores, *rest = scored(seed, num_groups)
    here, there = (
        run(bradley_terry_loss, scores, *rest, num_groups),
        run(bradley_terry_loss, scores + shift, *rest, num_groups),
    )
    close(there[0], here[0])
    close(there[1].sum(), torch.zeros((), dtype=torch.float64))
    loss, centred = one_pair(shift + 1, shift - 1)[0], one_pair(shift + 1, shift - 1, centering_coef=0.5)[0]
    assert centred - loss == pytest.approx(0.5 * (2 * shift) ** 2, abs=1e-9)


@given(SEED, NUM_GROUPS)
def test_swapping_chosen_and_rejected_adds_the_margin(seed, num_groups):
    scores, preferred, group_ids, _ = scored(seed, num_groups)
    value, _, metrics = run(bradley_terry_loss, scores, preferred, group_ids, None, num_groups)
    swapped, _, _ = run(bradley_terry_loss, scores, -preferred, group_ids, None, num_groups)
    close(swapped - value, metrics["margin"])


@given(SEED, NUM_GROUPS, LOSS, st.integers(1, 4))
def test_loss_gradient_and_metrics_are_the_same_however_whole_groups_are_cut(seed, num_groups, loss, cut):
    whole, gradient, metrics = run(loss, *scored(seed, num_groups), num_groups)
    ids = scored(seed, num_groups)[2]
    parts = [torch.isin(ids, part).nonzero().squeeze(-1) for part in torch.unique(ids).tensor_split(cut) if len(part)]
    results = [run(loss, *scored(seed, num_groups, part), num_groups) for part in parts]
    close(sum(result[0] for result in results), whole)
    close(torch.cat([result[1] for result in results]), gradient[torch.cat(parts)])
    for name, value in metrics.items():
        close(sum(result[2][name] for result in results), value)


@given(SEED, NUM_GROUPS, LOSS)
def test_the_order_of_rows_does_not_matter(seed, num_groups, loss):
    straight = run(loss, *scored(seed, num_groups), num_groups)
    order = torch.randperm(len(straight[1]), generator=torch.Generator().manual_seed(seed))
    shuffled = run(loss, *scored(seed, num_groups, order), num_groups)
    close(shuffled[0], straight[0])
    close(shuffled[1], straight[1][order])


@given(SEED, NUM_GROUPS, st.sampled_from([0.0, 1e9, math.nan, math.inf]))
def test_what_rows_outside_of_pairs_have_does_not_matter(seed, num_groups, garbage):
    scores, preferred, group_ids, margin = scored(seed, num_groups)
    clean = run(bradley_terry_loss, scores, preferred, group_ids, margin, num_groups)
    soiled = [torch.where(preferred == 0, garbage, values) for values in (scores, margin)]
    dirty = run(bradley_terry_loss, soiled[0], preferred, group_ids, soiled[1], num_groups)
    close(dirty[0], clean[0])
    close(dirty[1], clean[1])
    assert not dirty[1][preferred == 0].any()


@given(SEED, NUM_GROUPS)
def test_the_score_of_the_chosen_is_pushed_up_and_of_the_rejected_down(seed, num_groups):
    columns = scored(seed, num_groups)
    _, gradient, _ = run(bradley_terry_loss, *columns, num_groups)
    assert torch.equal(gradient.sign(), -columns[1].to(gradient))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("far", [-1000.0, -100.0, 100.0, 1000.0])
def test_a_difference_of_1000_gives_finite_values_and_gradients(dtype, far):
    loss, gradient, _ = one_pair(far, 0.0, dtype, centering_coef=0.01)
    assert math.isfinite(loss)
    assert all(map(math.isfinite, gradient))


def test_half_precision_is_computed_in_float32():
    scores = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    arguments = (BatchTotals(0, 0, 1), torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))
    loss, metrics = bradley_terry_loss(scores, *arguments)
    assert {loss.dtype, *(metric.dtype for metric in metrics.values())} == {torch.float32}


def test_only_the_scores_get_a_gradient():
    scores, preferred, group_ids, margin = scored(0, 3)
    margin.requires_grad_()
    _, _, metrics = run(bradley_terry_loss, scores, preferred, group_ids, margin, 3)
    assert margin.grad is None
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"centering_coef": -0.1}, ConfigError, "algorithm.centering_coef=-0.1: must be a finite number, at least 0"),
        ({"scores": torch.zeros(2, 1)}, ShapeError, r"scores is float32 \[2, 1\]; expected a tensor \[B\]"),
        ({"preferred": torch.zeros(3)}, ShapeError, r"preferred is float32 \[3\]; expected \[2\], one value a row"),
        ({"group_ids": torch.tensor([1, 2])}, ShapeError, r"group 1 has 1 chosen \(\+1\) and 0 rejected"),
        ({"margin": torch.zeros(3)}, ShapeError, r"margin is float32 \[3\]; expected \[2\], one value a row"),
        ({"totals": BatchTotals(0, 0)}, ShapeError, r"totals.num_groups is 0, but this micro-batch alone has 1"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    arguments = {
        "scores": torch.zeros(2),
        "totals": BatchTotals(0, 0, 1),
        "preferred": torch.tensor([1.0, -1.0]),
        "group_ids": torch.tensor([1, 1]),
    }
    with pytest.raises(error, match=message):
        bradley_terry_loss(**(arguments | changes))
