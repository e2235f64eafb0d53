"""PPO's clipped surrogate with its correction and its KL term, as one loss with flat settings."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals, per_token
from penstock.algorithms.losses import policy_loss, ppo_clip_loss
from penstock.conf.algorithms import AGGREGATIONS, CORRECTIONS
from penstock.conf.errors import ConfigError, ShapeError
from tests.algorithms.losses.ragged import batch, run

ONE = BatchTotals(1, 1)


def one_token(ratio, advantage, *, weight=1.0, **settings):
    """Loss, gradient and metrics of one token with π / π_old = `ratio` and π_old / π_behavior = `weight`."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    behavior = old - math.log(weight)
    loss, metrics = ppo_clip_loss(
        new, torch.ones(1, 1), ONE, torch.tensor([advantage], dtype=torch.float64), behavior, old, **settings
    )
    loss.backward()
    return loss.item(), new.grad.item(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # dL/dlogπ = -ρ A inside, since dρ/dlogπ = ρ
        (1.0, 2.0, -2.0, -2.0, 0),  # -1 · 2
        (1.1, 2.0, -2.2, -2.2, 0),  # inside [0.8, 1.3]
        (1.5, 2.0, -2.6, 0.0, 1),  # A > 0, ρ > 1.3: -1.3 · 2, no gradient
        (0.5, 2.0, -1.0, -1.0, 0),  # A > 0, ρ < 0.8: the minimum is ρ A = 1, gradient flows
        (0.5, -2.0, 1.6, 0.0, 1),  # A < 0, ρ < 0.8: 0.8 · 2, no gradient
        (1.5, -2.0, 3.0, 3.0, 0),  # A < 0, ρ > 1.3: the minimum is ρ A = -3, gradient flows
        (1.5, 0.0, 0.0, 0.0, 0),  # no advantage, no loss
    ],
)
def test_the_clipped_surrogate_by_hand(ratio, advantage, loss, gradient, clipped):
    got_loss, got_gradient, metrics = one_token(ratio, advantage, clip_low=0.2, clip_high=0.3)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert metrics["clip_fraction"] == clipped
    assert metrics["pg_loss"] == pytest.approx(loss)


def test_the_truncated_correction_multiplies_loss_and_gradient():
    # w = min(1.5, 2) = 1.5; L = -1.5 · 1.1 · 2 = -3.3 = dL/dlogπ
    loss, gradient, metrics = one_token(1.1, 2.0, weight=1.5)
    assert loss == pytest.approx(-3.3)
    assert gradient == pytest.approx(-3.3)
    assert metrics["correction_weight_mean"] == pytest.approx(1.5)
    assert metrics["correction_capped_fraction"] == 0.0


def test_the_truncated_correction_is_capped():
    # w = min(5, 2) = 2; L = -2 · 1 · 2
    loss, _, metrics = one_token(1.0, 2.0, weight=5.0, correction_cap=2.0)
    assert loss == pytest.approx(-4.0)
    assert metrics["correction_capped_fraction"] == 1.0


def test_clipping_is_against_the_batch_start_and_uncorrected_against_the_engine():
    # π / π_old = 1, π / π_behavior = 1.5: clipped at 1.2 only where the ratio is taken against the engine
    _, gradient, metrics = one_token(1.0, 1.0, weight=1.5, correction="truncated")
    assert (gradient, metrics["clip_fraction"]) == (pytest.approx(-1.5), 0.0)
    loss, gradient, metrics = one_token(1.0, 1.0, weight=1.5, correction="none")
    assert (loss, gradient, metrics["clip_fraction"]) == (pytest.approx(-1.2), 0.0, 1.0)
    assert "correction_weight_mean" not in metrics


def test_the_kl_term_is_added_with_its_coefficient():
    # r = log π - log π_ref = ln 2: k3 = 0.193147, gradient 1 - 1/2; L = -1 + 0.1 · 0.193147, gradient -1 + 0.1 · 0.5
    reference = torch.tensor([[-1.0 - math.log(2)]], dtype=torch.float64)
    loss, gradient, metrics = one_token(1.0, 1.0, kl_coef=0.1, reference_logprobs=reference)
    assert loss == pytest.approx(-1 + 0.0193147)
    assert gradient == pytest.approx(-0.95)
    assert metrics["kl"] == pytest.approx(0.193147, abs=1e-6)
    assert metrics["pg_loss"] == -1.0


def test_kl_is_measured_but_not_added_with_coefficient_zero():
    reference = torch.tensor([[-1.0 - math.log(2)]], dtype=torch.float64)
    loss, gradient, metrics = one_token(1.0, 1.0, kl_coef=0.0, reference_logprobs=reference)
    assert (loss, gradient) == (-1.0, -1.0)
    assert metrics["kl"] == pytest.approx(0.193147, abs=1e-6)


LOSS = st.builds(
    partial,
    st.just(ppo_clip_loss),
    clip_low=st.just(0.2),
    clip_high=st.just(0.3),
    kl_coef=st.sampled_from([0.0, 0.1]),
    aggregation=st.sampled_from(AGGREGATIONS),
    correction=st.sampled_from(CORRECTIONS),
)


@given(st.integers(0, 2**16), st.integers(1, 6), st.integers(1, 6), LOSS, st.integers(0, 6))
def test_loss_gradient_and_metrics_are_the_same_however_the_batch_is_cut(seed, rows, width, loss, cut):
    logprobs, mask, columns = batch(seed, rows, width)
    totals = BatchTotals.of(mask)
    whole, gradient, metrics = run(loss, logprobs, mask, columns, totals)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    parts = [part for part in torch.tensor_split(order, [min(cut, rows)]) if len(part)]
    results = [
        run(loss, logprobs[part], mask[part], {name: value[part] for name, value in columns.items()}, totals)
        for part in parts
    ]
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    close(sum(result[0] for result in results), whole)
    close(torch.cat([result[1] for result in results]), gradient[order])
    for name, value in metrics.items():
        torch.testing.assert_close(sum(result[2][name] for result in results), value, rtol=1e-5, atol=1e-7)


@given(
    st.integers(0, 2**16),
    st.integers(1, 5),
    st.integers(1, 6),
    LOSS,
    st.sampled_from([0.0, 1e9, -1e9, math.nan, math.inf]),
)
def test_what_lies_under_padding_changes_nothing(seed, rows, width, loss, garbage):
    logprobs, mask, columns = batch(seed, rows, width)
    totals = BatchTotals.of(mask)
    clean = run(loss, logprobs, mask, columns, totals)

    def soiled(values):
        return torch.nn.functional.pad(torch.where(mask, values, garbage), (0, 2), value=garbage)

    dirty_columns = {name: value if value.dim() == 1 else soiled(value) for name, value in columns.items()}
    dirty = run(loss, soiled(logprobs), torch.nn.functional.pad(mask, (0, 2)), dirty_columns, totals)
    torch.testing.assert_close(dirty[0], clean[0])
    torch.testing.assert_close(dirty[1][:, :-2], clean[1])
    assert dirty[1][:, -2:].abs().sum() == 0
    for name, value in clean[2].items():
        torch.testing.assert_close(dirty[2][name], value)


@given(st.integers(0, 2**16), LOSS)
def test_the_gradient_is_zero_exactly_where_the_clip_says(seed, loss):
    loss = partial(loss, kl_coef=0.0)
    logprobs, mask, columns = batch(seed, 4, 5)
    _, gradient, metrics = run(loss, logprobs, mask, columns, BatchTotals.of(mask))
    old = columns["old_logprobs" if loss.keywords["correction"] == "truncated" else "behavior_logprobs"]
    ratio, advantage = (logprobs - old).exp(), columns["advantage"][:, None].expand(4, 5)
    cut = ((advantage > 0) & (ratio > 1.3)) | ((advantage < 0) & (ratio < 0.8))
    assert torch.equal(gradient == 0, cut | ~mask)
    assert torch.equal(gradient.sign()[~cut & mask], -advantage.sign()[~cut & mask])
    share = (cut & mask).sum() / mask.sum().clamp(min=1)
    torch.testing.assert_close(metrics["clip_fraction"], share, check_dtype=False)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("far", [100.0, -100.0])
@pytest.mark.parametrize("argument", ["logprobs", "old_logprobs", "behavior_logprobs", "reference_logprobs"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_log_ratio_of_100_gives_finite_values_and_gradients(correction, far, argument, advantage):
    tensors = {
        name: torch.zeros(1, 1) for name in ("logprobs", "old_logprobs", "behavior_logprobs", "reference_logprobs")
    }
    tensors[argument] += far
    tensors["logprobs"].requires_grad_()
    loss, metrics = ppo_clip_loss(
        mask=torch.ones(1, 1),
        totals=ONE,
        advantage=torch.tensor([advantage]),
        kl_coef=0.1,
        correction=correction,
        **tensors,
    )
    loss.backward()
    assert loss.isfinite()
    assert tensors["logprobs"].grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_only_the_policy_gets_a_gradient():
    logprobs, mask, columns = batch(0, 3, 4)
    for value in columns.values():
        value.requires_grad_()
    run(partial(ppo_clip_loss, kl_coef=0.1), logprobs, mask, columns, BatchTotals.of(mask))
    assert all(value.grad is None for value in columns.values())


def test_on_policy_the_gradient_is_that_of_reinforce():
    logprobs, mask, columns = batch(1, 3, 4)
    columns["old_logprobs"] = columns["behavior_logprobs"] = logprobs
    _, gradient, metrics = run(ppo_clip_loss, logprobs, mask, columns, BatchTotals.of(mask))
    expected = -columns["advantage"][:, None] * mask / mask.sum()
    torch.testing.assert_close(gradient, expected)
    assert metrics["clip_fraction"] == 0.0


def test_advantages_may_be_one_a_row_or_one_a_token():
    logprobs, mask, columns = batch(2, 3, 4)
    by_row = run(ppo_clip_loss, logprobs, mask, columns, BatchTotals.of(mask))
    columns["advantage"] = columns["advantage"][:, None].expand(3, 4)
    by_token = run(ppo_clip_loss, logprobs, mask, columns, BatchTotals.of(mask))
    assert torch.equal(by_row[0], by_token[0])
    assert torch.equal(by_row[1], by_token[1])


def test_half_precision_is_computed_in_float32():
    logprobs, mask, columns = batch(3, 3, 4, torch.bfloat16)
    value, _, metrics = run(ppo_clip_loss, logprobs, mask, columns, BatchTotals.of(mask))
    assert value.dtype == torch.float32
    assert {metric.dtype for metric in metrics.values()} == {torch.float32}
    assert not any(metric.requires_grad for metric in metrics.values())


def test_advantages_of_padding_are_zero():
    mask = torch.tensor([[True, False]])
    assert per_token(torch.tensor([3.0]), mask).tolist() == [[3.0, 0.0]]
    assert per_token(torch.tensor([[3.0, math.nan]]), mask).tolist() == [[3.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clip_low": -0.1}, ConfigError, "algorithm.clip_low=-0.1: must be a finite number, at least 0"),
        ({"clip_high": math.nan}, ConfigError, "algorithm.clip_high=nan"),
        ({"kl_coef": -1}, ConfigError, "algorithm.kl_coef=-1"),
        ({"correction_cap": -1}, ConfigError, "correction_cap=-1"),
        ({"kl_coef": 0.1}, ConfigError, "algorithm.kl_coef=0.1 needs reference_logprobs, which nothing writes"),
        ({"correction": "trunc"}, ConfigError, "algorithm.correction=trunc: unknown; did you mean 'truncated'"),
        ({"aggregation": "mean"}, ConfigError, "aggregation=mean: unknown"),
        ({"logprobs": torch.zeros(2)}, ShapeError, r"logprobs is float32 \[2\]; expected a tensor \[B, T\]"),
        ({"mask": torch.ones(2, 2)}, ShapeError, r"mask is float32 \[2, 2\]; expected \[2, 3\], the shape of logprobs"),
        ({"mask": torch.full((2, 3), 2)}, ShapeError, r"mask is int64 \[2, 3\] with values other than 0 and 1"),
        (
            {"advantage": torch.zeros(3)},
            ShapeError,
            r"advantage is float32 \[3\]; expected \[2\] \(a row\) or \[2, 3\]",
        ),
        ({"old_logprobs": torch.zeros(2, 4)}, ShapeError, r"old_logprobs is float32 \[2, 4\]; expected \[2, 3\]"),
        ({"behavior_logprobs": None}, ShapeError, r"behavior_logprobs is NoneType; expected \[2, 3\]"),
        ({"reference_logprobs": torch.zeros(1, 3)}, ShapeError, r"reference_logprobs is float32 \[1, 3\]"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    arguments = {name: torch.zeros(2, 3) for name in ("logprobs", "old_logprobs", "behavior_logprobs")}
    arguments |= {"mask": torch.ones(2, 3), "totals": BatchTotals(6, 2), "advantage": torch.zeros(2)}
    with pytest.raises(error, match=message):
        ppo_clip_loss(**(arguments | changes))


def test_the_preset_is_the_driver_with_its_defaults():
    logprobs, mask, columns = batch(5, 3, 4)
    preset = run(ppo_clip_loss, logprobs, mask, columns, BatchTotals.of(mask))
    driver = run(policy_loss, logprobs, mask, columns, BatchTotals.of(mask))
    assert torch.equal(preset[0], driver[0])
    assert torch.equal(preset[1], driver[1])
    assert preset[2] == driver[2]
