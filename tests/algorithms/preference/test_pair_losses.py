"""What DPO, IPO, SimPO and ORPO have in common, checked on all of them."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses.preference import dpo_loss, ipo_loss, orpo_loss, simpo_loss
from penstock.conf.errors import ConfigError, ShapeError
from tests.algorithms.preference.batches import (
    NUM_GROUPS,
    SEED,
    WIDTH,
    assert_same_however_cut,
    close,
    one_pair,
    random_batch,
    run,
)

MONOTONE = {
    "dpo": partial(dpo_loss, beta=0.7),
    "dpo_reference_free": partial(dpo_loss, reference_free=True),
    "simpo": partial(simpo_loss, beta=2.5, target_margin=0.5),
    "orpo": partial(orpo_loss, odds_ratio_coef=0.3),
}
"""The larger the margin the smaller the loss, without end."""
LOSSES = MONOTONE | {
    "cdpo": partial(dpo_loss, label_smoothing=0.2),
    "ipo": partial(ipo_loss, beta=0.4),
    "ipo_mean": partial(ipo_loss, length_normalize=True),
    "ipo_reference_free": partial(ipo_loss, reference_free=True),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
ANY_LOSS = st.sampled_from(list(LOSSES.values()))


@given(SEED, NUM_GROUPS, WIDTH, ANY_LOSS, st.integers(1, 4))
def test_loss_gradient_and_metrics_are_the_same_however_whole_groups_are_cut(seed, num_groups, width, loss, cut):
    assert_same_however_cut(loss, random_batch(seed, num_groups, width), cut)


@given(SEED, NUM_GROUPS, WIDTH, ANY_LOSS)
def test_the_order_of_rows_does_not_matter(seed, num_groups, width, loss):
    batch = random_batch(seed, num_groups, width)
    order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(seed))
    straight, shuffled = run(loss, batch), run(loss, batch.take(order))
    close(shuffled[0], straight[0])
    close(shuffled[1], straight[1][order])
    close(shuffled[2], straight[2])


@given(SEED, NUM_GROUPS, WIDTH, ANY_LOSS, st.sampled_from([0.0, 1e9, -1e9, float("nan"), float("inf")]))
def test_what_lies_under_padding_changes_nothing(seed, num_groups, width, loss, garbage):
    batch = random_batch(seed, num_groups, width)
    clean, dirty = run(loss, batch), run(loss, batch.with_garbage_in_padding(garbage))
    close(dirty[0], clean[0])
    close(dirty[1][:, :width], clean[1])
    assert not dirty[1][:, width:].any()
    close(dirty[2], clean[2])


@given(SEED, NUM_GROUPS, WIDTH, ANY_LOSS)
def test_rows_and_groups_without_a_pair_get_no_gradient(seed, num_groups, width, loss):
    batch = random_batch(seed, num_groups, width)
    _, gradient, metrics = run(loss, batch)
    assert not gradient[batch.columns["preferred"] == 0].any()
    assert metrics["pair_fraction"].item() == (batch.columns["preferred"] == 1).sum().item() / num_groups


@each_loss
def test_a_group_without_a_pair_adds_zero_but_counts_in_the_mean(loss):
    batch = one_pair([-1.0], [-2.0], reference_logprobs=[[-1.5], [-1.0]])
    alone, _, _ = run(loss, batch)
    batch.totals = batch.totals + type(batch.totals)(2, 2, 1)
    close(run(loss, batch)[0], alone / 2)
    unpaired = batch.with_columns(preferred=torch.zeros(2))
    value, gradient, metrics = run(loss, unpaired)
    assert value == 0
    assert not gradient.any()
    assert all(metric == 0 for metric in metrics.values())


@given(SEED, NUM_GROUPS, WIDTH, st.sampled_from(list(MONOTONE.values())))
def test_every_token_of_the_chosen_is_pushed_up_and_of_the_rejected_down(seed, num_groups, width, loss):
    batch = random_batch(seed, num_groups, width)
    _, gradient, _ = run(loss, batch)
    preferred = batch.columns["preferred"]
    assert (gradient[preferred == 1] <= 0).all()
    assert (gradient[preferred == -1] >= 0).all()
    assert (gradient[preferred == 1][batch.mask[preferred == 1]] < 0).all()


@each_loss
def test_only_the_policy_gets_a_gradient(loss):
    batch = random_batch(0, 3, 4)
    batch.columns["reference_logprobs"].requires_grad_()
    batch.columns["preferred"].requires_grad_()
    _, _, metrics = run(loss, batch)
    assert all(value.grad is None for value in batch.columns.values())
    assert not any(value.requires_grad for value in metrics.values())


@each_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("far", [-1000.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize("row", [0, 1])
def test_a_log_ratio_of_1000_gives_finite_values_and_gradients(loss, dtype, far, row):
    batch = one_pair([0.0], [0.0], reference_logprobs=[[0.0], [0.0]])
    far_column = batch.columns["reference_logprobs"] if far > 0 else batch.logprobs
    far_column[row] = -abs(far)
    batch.columns["reference_logprobs"] = batch.columns["reference_logprobs"].to(dtype)
    batch.logprobs = batch.logprobs.to(dtype)
    value, gradient, metrics = run(loss, batch)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert all(metric.isfinite() for metric in metrics.values())


@each_loss
def test_half_precision_is_computed_in_float32(loss):
    value, gradient, metrics = run(loss, random_batch(3, 3, 4, torch.bfloat16))
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert {metric.dtype for metric in metrics.values()} == {torch.float32}


@each_loss
def test_responses_without_a_token_are_fine(loss):
    batch = one_pair([], [], reference_logprobs=[[], []])
    value, gradient, _ = run(loss, batch)
    assert value.isfinite()
    assert gradient.shape == (2, 0)


@each_loss
def test_the_accuracy_is_the_share_of_pairs_with_a_positive_margin(loss):
    # the policy has raised the chosen by 0.5 and lowered the rejected by 1, from a lower start in both
    better = one_pair([-0.5], [-3.0], reference_logprobs=[[-1.0], [-2.0]])
    worse = better.with_columns(preferred=torch.tensor([-1.0, 1.0]))
    for batch, sign, accuracy in ((better, 1, 1.0), (worse, -1, 0.0)):
        metrics = run(loss, batch)[2]
        assert metrics["accuracy"] == accuracy
        assert metrics["margin"].sign() == sign
        close(metrics["margin"], metrics["chosen_reward"] - metrics["rejected_reward"])


@each_loss
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": torch.zeros(2)}, r"logprobs is float32 \[2\]; expected a tensor \[B, T\]"),
        ({"mask": torch.ones(2, 2)}, r"mask is float32 \[2, 2\]; expected \[2, 3\], the shape of logprobs"),
        ({"mask": torch.full((2, 3), 2)}, r"mask is int64 \[2, 3\] with values other than 0 and 1"),
        ({"preferred": torch.zeros(3)}, r"preferred is float32 \[3\]; expected \[2\], one value a row"),
        ({"preferred": torch.zeros(2, 3)}, r"preferred is float32 \[2, 3\]; expected \[2\], one value a row"),
        ({"preferred": torch.ones(2)}, r"group 5 has 2 chosen"),
        ({"group_ids": torch.zeros(3)}, r"group_ids is float32 \[3\]; expected \[2\], one value a row"),
        ({"group_ids": torch.zeros(2)}, r"group_ids is float32 \[2\]; expected integers"),
    ],
)
def test_bad_tensors_are_named(loss, changes, message):
    arguments = valid_arguments(loss)
    with pytest.raises(ShapeError, match=message):
        loss(**(arguments | changes))


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        (dpo_loss, {"beta": 0.0}, r"algorithm.beta=0.0: must be a finite number, above 0"),
        (dpo_loss, {"beta": float("inf")}, r"algorithm.beta=inf: must be"),
        (dpo_loss, {"label_smoothing": 0.6}, r"algorithm.label_smoothing=0.6: must lie between 0.0 and 0.5"),
        (dpo_loss, {"label_smoothing": float("nan")}, r"algorithm.label_smoothing=nan: must lie"),
        (dpo_loss, {"reference_logprobs": None}, r"needs reference_logprobs, .* bind reference_free=True"),
        (ipo_loss, {"beta": -1.0}, r"algorithm.beta=-1.0: must be"),
        (ipo_loss, {"reference_logprobs": None}, r"Add flow.logprobs\('reference'\) to the dataflow"),
        (simpo_loss, {"beta": 0.0}, r"algorithm.beta=0.0: must be"),
        (simpo_loss, {"target_margin": -0.1}, r"algorithm.target_margin=-0.1: must be a finite number, at least 0"),
        (orpo_loss, {"odds_ratio_coef": -0.1}, r"algorithm.odds_ratio_coef=-0.1: must be"),
    ],
)
def test_bad_settings_are_named(loss, settings, message):
    with pytest.raises(ConfigError, match=message):
        loss(**(valid_arguments(loss) | settings))


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_a_reference_of_another_shape_is_named(loss):
    with pytest.raises(
        ShapeError, match=r"reference_logprobs is float32 \[2, 4\]; expected \[2, 3\], the shape of log"
    ):
        loss(**(valid_arguments(loss) | {"reference_logprobs": torch.zeros(2, 4)}))


def valid_arguments(loss):
    batch = one_pair([-1.0] * 3, [-1.0] * 3, reference_logprobs=[[-1.0] * 3] * 2)
    arguments = {"logprobs": batch.logprobs, "mask": batch.mask, "totals": batch.totals} | batch.columns
    if getattr(loss, "func", loss) in (simpo_loss, orpo_loss):
        del arguments["reference_logprobs"]
    return arguments
