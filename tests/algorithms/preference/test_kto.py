from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses.preference import group_baseline, kto_loss
from penstock.conf.errors import ConfigError, ShapeError
from tests.algorithms.preference.batches import (
    NUM_GROUPS,
    SEED,
    WIDTH,
    Batch,
    assert_same_however_cut,
    close,
    random_batch,
    run,
)

LOSS = st.builds(
    partial,
    st.just(kto_loss),
    beta=st.floats(0.05, 5),
    desirable_weight=st.sampled_from([1.0, 1.5]),
    undesirable_weight=st.sampled_from([1.0, 0.5]),
)


def samples(ratios, desirable, group_ids=None):
    """Rows of one token with these log-ratios against a reference of log-probability -5."""
    rows = len(ratios)
    reference = torch.full((rows, 1), -5.0, dtype=torch.float64)
    columns = {
        "desirable": torch.tensor(desirable, dtype=torch.float32),
        "group_ids": torch.tensor(group_ids or [0] * rows),
        "reference_logprobs": reference,
    }
    logprobs = reference + torch.tensor(ratios, dtype=torch.float64)[:, None]
    return Batch(logprobs, torch.ones(rows, 1, dtype=torch.bool), columns, BatchTotals(rows, rows, 1))


def test_kto_by_hand():
    # z_0 from the others of the group: (-1 + 1) / 2 = 0; (2 + 1) / 2 = 1.5; (2 - 1) / 2 = 0.5
    # β (r - z_0) = 0.5 · 2 = 1 for the desirable; β (z_0 - r) = 0.5 · 2.5 = 1.25 for the undesirable
    # L = (1 · σ(-1) + 2 · σ(-1.25)) / 3 = (0.268941 + 2 · 0.222700) / 3 = 0.238114
    # gradient: ∓λ β σ(x) σ(-x) / 3: -0.5 · 0.731059 · 0.268941 / 3 = -0.032769
    #                                2 · 0.5 · 0.777300 · 0.222700 / 3 = 0.057702
    batch = samples([2.0, -1.0, 1.0], [1, -1, 0])
    loss, gradient, metrics = run(partial(kto_loss, beta=0.5, undesirable_weight=2.0), batch)
    assert loss.item() == pytest.approx(0.238114, abs=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([-0.032769, 0.057702, 0.0], abs=1e-6)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": 0.238114,
            "accuracy": 2 / 3,
            "margin": 2.25 / 3,
            "kl_baseline": 2 / 3,
            "desirable_fraction": 1 / 3,
            "undesirable_fraction": 1 / 3,
            "desirable_reward": 1.0 / 3,
            "undesirable_reward": -0.5 / 3,
        },
        abs=1e-6,
    )


def test_a_baseline_that_a_stage_wrote_is_taken_and_is_at_least_zero():
    # z_0 = 1, max(0, -5), 0: margins 0.5 · (2 - 1) and -0.5 · (-1 - 0), both 0.5; σ(-0.5) = 0.377541, twice over 3
    batch = samples([2.0, -1.0, 1.0], [1, -1, 0]).with_columns(kl_baseline=torch.tensor([1.0, -5.0, 0.0]))
    loss, _, metrics = run(partial(kto_loss, beta=0.5), batch)
    assert loss.item() == pytest.approx(2 * 0.377541 / 3, abs=1e-6)
    assert metrics["kl_baseline"].item() == pytest.approx(1 / 3)


def test_the_baseline_of_a_row_is_the_mean_of_the_others_of_its_group():
    # group 4: rows 0, 2, 3, of which row 3 does not count; group 9: row 1 alone
    ratios, counts = torch.tensor([1.0, 5.0, 3.0, 70.0]), torch.tensor([True, True, True, False])
    assert group_baseline(ratios, torch.tensor([4, 9, 4, 4]), counts).tolist() == [3.0, 0.0, 1.0, 2.0]


def test_the_baseline_is_at_least_zero_and_has_no_gradient():
    baseline = group_baseline(
        torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0, 0]), torch.ones(2).bool()
    )
    assert baseline.tolist() == [0.0, 0.0]
    assert not baseline.requires_grad


@given(SEED, st.floats(-1000, 1000))
def test_the_baseline_of_a_row_does_not_depend_on_the_row(seed, value):
    generator = torch.Generator().manual_seed(seed)
    ratios, ids = torch.randn(6, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    everything = torch.ones(6, dtype=torch.bool)
    before = group_baseline(ratios, ids, everything)[2]
    ratios[2] = value
    torch.testing.assert_close(group_baseline(ratios, ids, everything)[2], before)


@given(SEED, NUM_GROUPS, WIDTH, LOSS, st.integers(1, 4))
def test_loss_gradient_and_metrics_are_the_same_however_whole_groups_are_cut(seed, num_groups, width, loss, cut):
    assert_same_however_cut(loss, random_batch(seed, num_groups, width), cut)


@given(SEED, NUM_GROUPS, WIDTH, LOSS, st.sampled_from([0.0, 1e9, float("nan"), -float("inf")]))
def test_neither_the_order_of_rows_nor_what_lies_under_padding_matters(seed, num_groups, width, loss, garbage):
    batch = random_batch(seed, num_groups, width)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    clean, other = run(loss, batch), run(loss, batch.with_garbage_in_padding(garbage).take(order))
    close(other[0], clean[0])
    close(other[1][:, :width], clean[1][order])
    assert not other[1][:, width:].any()
    close(other[2], clean[2])


@given(SEED, NUM_GROUPS, WIDTH, LOSS)
def test_rows_without_a_token_add_nothing_and_count_nowhere(seed, num_groups, width, loss):
    batch = random_batch(seed, num_groups, width)
    with_tokens = batch.take(batch.mask.any(dim=-1).nonzero().squeeze(-1))
    everything, some = run(loss, batch), run(loss, with_tokens)
    close(everything[0], some[0])
    close(everything[2], some[2])


@given(SEED, NUM_GROUPS, WIDTH, LOSS)
def test_the_desirable_are_pushed_up_the_undesirable_down_and_the_others_not(seed, num_groups, width, loss):
    batch = random_batch(seed, num_groups, width)
    _, gradient, _ = run(loss, batch)
    expected = -batch.columns["desirable"][:, None] * batch.mask
    assert torch.equal(gradient.sign(), expected.to(gradient))


@given(SEED, NUM_GROUPS, WIDTH, st.floats(0.1, 3))
def test_loss_and_loss_with_flipped_labels_add_up_to_the_weight_of_the_labelled(seed, num_groups, width, weight):
    # σ(x) + σ(-x) = 1 for each sample
    batch = random_batch(seed, num_groups, width)
    loss = partial(kto_loss, desirable_weight=weight, undesirable_weight=weight)
    value, _, metrics = run(loss, batch)
    flipped, _, flipped_metrics = run(loss, batch.with_columns(desirable=-batch.columns["desirable"]))
    close(value + flipped, weight * (metrics["desirable_fraction"] + metrics["undesirable_fraction"]))
    close(flipped_metrics["margin"], -metrics["margin"])


@given(SEED, NUM_GROUPS)
def test_a_weight_of_zero_takes_the_kind_out(seed, num_groups):
    batch = random_batch(seed, num_groups, 4)
    desirable = batch.columns["desirable"]
    _, gradient, _ = run(partial(kto_loss, undesirable_weight=0.0), batch)
    _, alone, _ = run(kto_loss, batch.with_columns(desirable=desirable.clamp(min=0)))
    close(gradient, alone)


@given(SEED, NUM_GROUPS, st.floats(0.05, 5))
def test_where_policy_is_reference_each_labelled_sample_loses_half_its_weight(seed, num_groups, beta):
    batch = random_batch(seed, num_groups, 4)
    loss, _, metrics = run(partial(kto_loss, beta=beta), batch.with_columns(reference_logprobs=batch.logprobs))
    close(loss, (metrics["desirable_fraction"] + metrics["undesirable_fraction"]) / 2)
    assert metrics["kl_baseline"] == metrics["accuracy"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("far", [-1000.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize("label", [1, -1])
def test_a_log_ratio_of_1000_gives_finite_values_and_gradients(dtype, far, label):
    batch = samples([far, 0.0], [label, -label])
    batch.logprobs = batch.logprobs.to(dtype)
    loss, gradient, metrics = run(kto_loss, batch)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(metric.isfinite() for metric in metrics.values())


def test_only_the_policy_gets_a_gradient():
    batch = random_batch(0, 3, 4)
    batch = batch.with_columns(kl_baseline=torch.ones(len(batch.mask)))
    for name in ("reference_logprobs", "kl_baseline", "desirable"):
        batch.columns[name].requires_grad_()
    _, _, metrics = run(kto_loss, batch)
    assert all(value.grad is None for value in batch.columns.values())
    assert not any(value.requires_grad for value in metrics.values())


def test_half_precision_is_computed_in_float32():
    value, _, metrics = run(kto_loss, random_batch(3, 3, 4, torch.bfloat16))
    assert {value.dtype, *(metric.dtype for metric in metrics.values())} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"beta": 0.0}, ConfigError, "algorithm.beta=0.0: must be a finite number, above 0"),
        ({"desirable_weight": -1.0}, ConfigError, "algorithm.desirable_weight=-1.0: must be"),
        ({"undesirable_weight": float("nan")}, ConfigError, "algorithm.undesirable_weight=nan: must be"),
        ({"logprobs": torch.zeros(2)}, ShapeError, r"logprobs is float32 \[2\]; expected a tensor \[B, T\]"),
        ({"mask": torch.ones(3, 1)}, ShapeError, r"mask is float32 \[3, 1\]; expected \[2, 1\]"),
        ({"desirable": torch.ones(3)}, ShapeError, r"desirable is float32 \[3\]; expected \[2\], one value a row"),
        ({"desirable": torch.full((2,), 0.5)}, ShapeError, r"desirable is float32 \[2\] with 0.5 at row 0; expected"),
        ({"group_ids": torch.zeros(2)}, ShapeError, r"group_ids is float32 \[2\]; expected integers"),
        ({"group_ids": torch.zeros(1)}, ShapeError, r"group_ids is float32 \[1\]; expected \[2\], one value a row"),
        ({"reference_logprobs": torch.zeros(2, 2)}, ShapeError, r"reference_logprobs is float32 \[2, 2\]; expected"),
        ({"kl_baseline": torch.zeros(2, 1)}, ShapeError, r"kl_baseline is float32 \[2, 1\]; expected \[2\], one value"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    batch = samples([0.0, 0.0], [1, -1])
    arguments = {"logprobs": batch.logprobs, "mask": batch.mask, "totals": batch.totals} | batch.columns
    with pytest.raises(error, match=message):
        kto_loss(**(arguments | changes))
