"""Every registered surrogate with every registered correction, through what breaks formulas in practice."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.losses import SURROGATES, policy_loss
from penstock.conf.algorithms import AGGREGATIONS
from tests.algorithms.losses.ragged import OTHERS, columns_of
from tests.amounts import amount

ALL = pytest.mark.parametrize("surrogate", sorted(SURROGATES))
WITH_ALL = pytest.mark.parametrize("correction", sorted(CORRECTIONS))
WHOLE_BATCH = {"clip_cov", "kl_cov"}
"""Choose tokens by statistics of the call, as `losses/surrogates.py` says."""
PULLED_BACK = {"kl_cov"}
"""Has a term without an advantage."""
FEW = settings(max_examples=amount(25))
# bounds that random ratios reach, and shares of more than one token
OPTIONS = {
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo_token": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"clip_low": 0.5, "clip_high": 0.5},
    "dppo_tv": {"cap": 2.0},
    "ppo_clip": {"dual_clip": 2.0},
    "clip_cov": {"share": 0.2, "lowest": 0.1},
    "kl_cov": {"share": 0.2},
}


def no_ties(mask):
    """Two tokens have equal covariances, and those of one row are all zero, so that no token has the largest."""
    return mask.sum() > 2 and mask.any(dim=-1).sum() > 1


def run(surrogate, correction, columns, totals=None, **settings):
    """Loss, gradient and metrics; what must be finite always is."""
    leaf = columns["logprobs"].detach().clone().requires_grad_()
    totals = BatchTotals.of(columns["mask"]) if totals is None else totals
    loss, metrics = policy_loss(
        **(columns | {"logprobs": leaf}),
        totals=totals,
        surrogate=surrogate,
        surrogate_options=OPTIONS.get(surrogate, {}),
        correction=correction,
        **settings,
    )
    loss.backward()
    for name, value in ({"loss": loss, "gradient": leaf.grad} | metrics).items():
        assert value.isfinite().all(), f"{name} is {value}"
    assert not any(value.requires_grad for value in metrics.values())
    return loss.detach(), leaf.grad, metrics


def same(one, other, rtol=1e-9, atol=1e-12):
    for got, expected in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    assert set(one[2]) == set(other[2])
    for name, value in one[2].items():
        torch.testing.assert_close(value, other[2][name], rtol=1e-5, atol=1e-6, check_dtype=False)


@ALL
@WITH_ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_log_ratio_of_100_gives_finite_losses_gradients_and_metrics(surrogate, correction, dtype):
    for argument, far, advantage in product(("logprobs", *OTHERS), (100.0, -100.0), (1.0, -1.0, 0.0)):
        columns = {name: torch.full((2, 2), -1.0, dtype=dtype) for name in ("logprobs", *OTHERS)}
        columns[argument][0] += far
        columns |= {"advantage": torch.full((2,), advantage, dtype=dtype), "mask": torch.ones(2, 2)}
        loss, _, metrics = run(surrogate, correction, columns, kl_coef=0.1)
        assert {loss.dtype, *(value.dtype for value in metrics.values())} == {torch.float32}


@ALL
@WITH_ALL
@FEW
@given(seed=st.integers(0, 2**16), garbage=st.sampled_from([1e30, math.nan, math.inf, -math.inf]))
def test_what_lies_under_padding_changes_nothing(surrogate, correction, seed, garbage):
    columns = columns_of(seed)
    mask = columns["mask"]
    assume(surrogate not in WHOLE_BATCH or no_ties(mask))
    wide = torch.nn.functional.pad(mask, (0, 2, 0, 1))

    def soiled(values):
        if values.dim() == 1:
            return torch.nn.functional.pad(values, (0, 1), value=garbage)
        return torch.nn.functional.pad(torch.where(mask, values, garbage), (0, 2, 0, 1), value=garbage)

    dirty_columns = {name: soiled(value) for name, value in columns.items()} | {"mask": wide}
    clean = run(surrogate, correction, columns, kl_coef=0.1)
    dirty = run(surrogate, correction, dirty_columns, kl_coef=0.1)
    assert (dirty[1][~wide] == 0).all()
    same((dirty[0], dirty[1][:-1, :-2], dirty[2]), clean)


@ALL
@WITH_ALL
@FEW
@given(seed=st.integers(0, 2**16), how=st.sampled_from(AGGREGATIONS), cut=st.integers(0, 4))
def test_micro_batches_in_any_order_add_up_to_the_batch(surrogate, correction, seed, how, cut):
    columns = columns_of(seed)
    totals = BatchTotals.of(columns["mask"])
    assume(surrogate not in WHOLE_BATCH or no_ties(columns["mask"]))
    step = partial(run, surrogate, correction, totals=totals, kl_coef=0.1, aggregation=how, constant=7.0)
    whole, order = step(columns), torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    cuts = [] if surrogate in WHOLE_BATCH else [cut]
    parts = [step({name: value[rows] for name, value in columns.items()}) for rows in torch.tensor_split(order, cuts)]
    metrics = {name: sum(part[2][name] for part in parts) for name in whole[2]}
    summed = sum(part[0] for part in parts), torch.cat([part[1] for part in parts])[order.argsort()], metrics
    same(summed, whole)


@ALL
@WITH_ALL
@FEW
@given(seed=st.integers(0, 2**16))
def test_without_an_advantage_there_is_no_gradient(surrogate, correction, seed):
    columns = columns_of(seed)
    columns["advantage"] = torch.zeros(4)
    loss, gradient, _ = run(surrogate, correction, columns)
    if surrogate not in PULLED_BACK:
        assert loss == 0
        assert (gradient == 0).all()


@ALL
@WITH_ALL
@FEW
@given(seed=st.integers(0, 2**16))
def test_a_step_raises_good_tokens_and_lowers_bad_ones_or_leaves_them(surrogate, correction, seed):
    columns = columns_of(seed)
    _, gradient, _ = run(surrogate, correction, columns)
    if surrogate not in PULLED_BACK:
        assert (gradient * columns["advantage"][:, None] <= 0).all()


@ALL
@FEW
@given(seed=st.integers(0, 2**16))
def test_on_policy_every_surrogate_is_reinforce(surrogate, seed):
    columns = columns_of(seed)
    columns["old_logprobs"] = columns["behavior_logprobs"] = columns["logprobs"]
    off = {"surrogate_options": {"share": 0.0}} if surrogate in WHOLE_BATCH else {}
    leaf = columns["logprobs"].clone().requires_grad_()
    totals = BatchTotals.of(columns["mask"])
    loss, _ = policy_loss(
        **(columns | {"logprobs": leaf}), totals=totals, surrogate=surrogate, aggregation="sequence_mean", **off
    )
    loss.backward()
    length = columns["mask"].sum(dim=-1, keepdim=True).clamp(min=1)
    expected = -columns["advantage"][:, None] * columns["mask"] / length / max(totals.num_sequences, 1)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-9, atol=1e-12)


@ALL
@WITH_ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(surrogate, correction, dtype):
    half = columns_of(3, dtype=dtype)
    single = {name: value if value.dtype == torch.bool else value.float() for name, value in half.items()}
    loss, gradient, metrics = run(surrogate, correction, half, kl_coef=0.1)
    exact, exact_gradient, exact_metrics = run(surrogate, correction, single, kl_coef=0.1)
    assert loss == exact
    assert gradient.dtype == dtype
    assert torch.equal(gradient, exact_gradient.to(dtype))
    assert metrics == exact_metrics


@ALL
@WITH_ALL
@pytest.mark.parametrize(("rows", "width"), [(0, 3), (2, 0), (0, 0), (3, 2)])
def test_a_batch_without_a_token_is_zero_everywhere(surrogate, correction, rows, width):
    columns = columns_of(0, rows, max(width, 1))
    columns = {name: value if value.dim() == 1 else value[:, :width] for name, value in columns.items()}
    columns["mask"] = torch.zeros(rows, width, dtype=torch.bool)
    loss, gradient, metrics = run(surrogate, correction, columns, kl_coef=0.1)
    assert loss == 0
    assert (gradient == 0).all()
    assert all(value == 0 for value in metrics.values())


@ALL
@WITH_ALL
def test_only_the_policy_gets_a_gradient(surrogate, correction):
    columns = columns_of(1)
    for name in ("logprobs", *OTHERS, "advantage"):
        columns[name].requires_grad_()
    totals = BatchTotals.of(columns["mask"])
    loss, _ = policy_loss(**columns, totals=totals, surrogate=surrogate, correction=correction, kl_coef=0.1)
    loss.backward()
    assert columns["logprobs"].grad is not None
    assert all(columns[name].grad is None for name in (*OTHERS, "advantage"))


@ALL
@WITH_ALL
def test_the_correction_multiplies_the_gradient_of_the_surrogate(surrogate, correction):
    # a weight is a constant a token: of one token a row, the gradient is that without it times the weight
    columns = columns_of(2, rows=6, width=1) | {"mask": torch.ones(6, 1)}
    weight, _ = CORRECTIONS[correction](columns["old_logprobs"], columns["behavior_logprobs"], torch.ones(6, 1) == 1)
    weighted = run(surrogate, correction, columns | {"proximal_logprobs": columns["old_logprobs"]}, proximal="column")
    plain = run(surrogate, "none", columns | {"proximal_logprobs": columns["old_logprobs"]}, proximal="column")
    torch.testing.assert_close(weighted[1], weight * plain[1])
