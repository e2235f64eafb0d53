"""The formulas against verl's `core_algos`, on random ragged batches: values and gradients, rtol 1e-5.

Runs in its own environment, `make oracle`; verl is never a dependency. What differs on purpose, and is not compared:

- A group of one: verl gives its plain reward (its mean is taken to be 0) in GRPO, RLOO and OPO. Here it is 0, there
  being nothing to compare with. The groups below have four samples.
- k3 is cut to ±10 by verl, here only its log-ratio is clamped. Log-ratios below stay within 1.
- SAPO always averages by sequence in verl; here the aggregation is the caller's.
- GMPO: verl averages over all rows, those without a token among them, and makes a correction geometric, too. Here a row
  without a token counts nowhere, and a correction multiplies like any other. Compared without a correction.
- Clip-Cov draws its tokens from a global generator; here the draw is a function of the tokens. Compared where all
  candidates are chosen.
- GSPO clamps the mean log-ratio at 10 from above in verl, at ±20 here. Beyond what is drawn below.
- GPG: verl counts samples whose reward is not zero where the paper counts those with a gradient. Compared on rewards
  where the two are the same.
- REINFORCE++ with a baseline whitens over tokens in verl, so that long responses weigh more in the deviation; here over
  responses. Compared through `whitened`, which is over tokens.
- The default of the dual clip: always on at 3 in verl, off here. Compared with it on.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.tensordict_utils import make_iterator
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import ActorConfig, PolicyLossConfig

from penstock.algorithms import advantages, kl
from penstock.algorithms.aggregation import BatchTotals, aggregate
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.losses import value_loss
from tests.oracle.batches import SEEDS, TOLERANCE, assert_same, batch, ours, theirs
from tests.oracle.epochs import Table, of_rows, train

AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}


def config(**settings):
    defaults = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "loss_scale_factor": 11}
    info = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": 11}
    shape = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "global_batch_info": info}
    return ActorConfig(**(shape | defaults | settings))


def verl_loss(name, columns, how="token_mean", weights=None, **settings):
    return theirs(columns, loss_function(name, columns, how, weights, **settings))


def loss_function(name, columns, how="token_mean", weights=None, **settings):
    """verl's loss of these columns, as a function of the log-probabilities."""
    mask = columns["mask"].double()

    def loss_of(logprobs):
        return core_algos.get_policy_loss_fn(name)(
            old_log_prob=columns["old_logprobs"],
            log_prob=logprobs,
            advantages=columns["advantage"][:, None].expand(mask.shape).clone(),
            response_mask=mask,
            loss_agg_mode=AGGREGATIONS[how],
            config=config(**settings),
            rollout_is_weights=weights,
        )[0]

    return loss_of


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize(
    ("name", "surrogate", "options", "settings"),
    [
        ("vanilla", "ppo_clip", CLIPS | {"dual_clip": 1.3}, {"clip_ratio_c": 1.3}),
        ("gspo", "gspo_token", CLIPS, {}),
        ("gspo", "gspo", CLIPS, {}),
        ("cispo", "cispo", CLIPS, {}),
        ("dppo_tv", "dppo_tv", {"clip_low": 0.05, "clip_high": 0.08, "cap": 1.2},
         {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1.2}),
        ("gpg", "gpg", {}, {}),
        ("gpg", "reinforce", {}, {}),
        ("kl_cov", "kl_cov", {"share": 0.2, "coef": 0.7},
         {"policy_loss": PolicyLossConfig(kl_cov_ratio=0.2, ppo_kl_coef=0.7)}),
        ("clip_cov", "clip_cov", CLIPS | {"share": 1.0, "lowest": 0.02, "highest": 0.2},
         {"policy_loss": PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.02, clip_cov_ub=0.2)}),
    ],
)  # fmt: skip
@given(seed=SEEDS)
def test_policy_losses(name, surrogate, options, settings, how, seed):
    columns = batch(seed)
    expected = verl_loss(name, columns, how, **settings)
    assert_same(ours(columns, surrogate=surrogate, surrogate_options=options, aggregation=how, constant=11.0), expected)


@pytest.mark.parametrize("epochs", [1, 3])
@given(seed=SEEDS)
def test_several_updates_a_batch_are_ppo_epochs(epochs, seed):
    """By the iterator of verl's actor. It can also shuffle the rows anew in each epoch, which is off by default."""
    columns = batch(seed)
    table, rows = Table(columns, seed), torch.arange(len(columns["mask"]))
    columns["old_logprobs"] = table.logprobs().detach()
    data = TensorDict({"rows": rows}, batch_size=len(rows))
    for part in make_iterator(data, 3, epochs, seed=42, dataloader_kwargs={"shuffle": False}):
        loss_of = loss_function("vanilla", of_rows(columns, part["rows"]), clip_ratio_c=1.3)
        table.step(loss_of(table.logprobs(part["rows"])))
    settings = {"surrogate_options": CLIPS | {"dual_clip": 1.3}}
    torch.testing.assert_close(train(columns, seed, [rows[:3], rows[3:]], epochs, **settings).logits, table.logits)


@given(seed=SEEDS)
def test_the_clip_acts_in_later_passes_alone(seed):
    columns, rows = batch(seed), torch.arange(6)
    clipped, free = ({"surrogate_options": dict.fromkeys(CLIPS, bound)} for bound in (0.01, 0.99e6))
    tables = [[train(columns, seed, [rows], epochs, **way).logits for way in (clipped, free)] for epochs in (1, 3)]
    assert torch.equal(*tables[0])
    assert not torch.equal(*tables[1])


@given(seed=SEEDS, positive=st.floats(0.3, 3), negative=st.floats(0.3, 3))
def test_sapo(seed, positive, negative):
    columns = batch(seed)
    expected = verl_loss("sapo", columns, tau_pos=positive, tau_neg=negative)
    options = {"positive_temperature": positive, "negative_temperature": negative}
    assert_same(ours(columns, surrogate="sapo", surrogate_options=options, aggregation="sequence_mean"), expected)


@given(seed=SEEDS)
def test_gmpo(seed):
    columns = batch(seed)
    expected = verl_loss("geo_mean", columns)
    assert_same(ours(columns, surrogate="gmpo", surrogate_options=CLIPS, aggregation="sequence_mean"), expected)


@pytest.mark.parametrize(
    ("name", "options", "level", "threshold"),
    [
        ("truncated", {"cap": 1.2}, "token", 1.2),
        ("sequence_truncated", {"cap": 1.2}, "sequence", 1.2),
        ("masked", {"low": 0.8, "high": 1.2}, "token", "0.8_1.2"),
    ],
)
@given(seed=SEEDS)
def test_corrections_and_what_they_do_to_a_loss(name, options, level, threshold, seed):
    columns = batch(seed)
    log_ratio = columns["old_logprobs"] - columns["behavior_logprobs"]
    weights, _ = compute_rollout_correction_weights(log_ratio, columns["mask"].double(), level, threshold)
    weight, _ = CORRECTIONS[name](columns["old_logprobs"], columns["behavior_logprobs"], columns["mask"], **options)
    torch.testing.assert_close(torch.where(columns["mask"], weight, 0.0), weights, **TOLERANCE)
    expected = verl_loss("vanilla", columns, weights=weights)
    got = ours(
        columns,
        proximal="old",
        surrogate_options=CLIPS | {"dual_clip": 3.0},
        correction=name,
        correction_options=options,
    )
    assert_same(got, expected)


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(seed=SEEDS)
def test_aggregations_also_with_rows_without_a_token(how, seed):
    columns = batch(seed, shortest=0)
    mask = columns["mask"]
    if mask.any():
        expected = core_algos.agg_loss(columns["logprobs"], mask.double(), AGGREGATIONS[how], loss_scale_factor=11)
        got = aggregate(columns["logprobs"], mask, BatchTotals.of(mask), how, constant=11.0)
        torch.testing.assert_close(got, expected, **TOLERANCE)


def groups(seed, num_groups=3, size=4, width=5):
    """Rewards at the last token of each response, as verl has them; no two groups agree, and no reward is zero."""
    columns = batch(seed, num_groups * size, width)
    reward = torch.randn(num_groups * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = torch.arange(num_groups).repeat_interleave(size)
    mask = columns["mask"]
    return reward, ids, mask, advantages.token_rewards(reward, mask).double(), columns


def of_tokens(advantage, mask):
    return torch.where(mask, advantage[:, None], torch.zeros((), dtype=advantage.dtype))


OUTCOME = {
    "grpo": (core_algos.compute_grpo_outcome_advantage, {}, lambda r, g, m: advantages.group_advantage(r, g)),
    "dr_grpo": (
        core_algos.compute_grpo_outcome_advantage,
        {"norm_adv_by_std_in_grpo": False},
        lambda r, g, m: advantages.dr_grpo(r, g),
    ),
    "rloo": (core_algos.compute_rloo_outcome_advantage, {}, lambda r, g, m: advantages.rloo(r, g)),
    "opo": (core_algos.compute_opo_outcome_advantage, {}, lambda r, g, m: advantages.opo(r, m.sum(dim=-1), g)),
    "gpg": (core_algos.compute_gpg_outcome_advantage, {}, lambda r, g, m: advantages.gpg(r, g)),
}


@pytest.mark.parametrize("name", OUTCOME)
@given(seed=SEEDS)
def test_outcome_advantages(name, seed):
    function, settings, mine = OUTCOME[name]
    _, ids, mask, token_rewards, _ = groups(seed)
    expected, _ = function(token_rewards, mask.double(), index=np.array(ids), **settings)
    got = of_tokens(mine(token_rewards.sum(dim=-1), ids, mask), mask)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@given(seed=SEEDS)
def test_reinforce_plus_plus_and_its_baseline_over_tokens(seed):
    reward, ids, mask, token_rewards, _ = groups(seed)
    expected, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        token_rewards, mask.double(), config=AlgoConfig(gamma=0.9)
    )
    returns = advantages.gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=0.9, lam=1.0)[1]
    got = advantages.whitened(returns, mask)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    expected, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        token_rewards.clone(), mask.double(), index=np.array(ids)
    )
    got = advantages.whitened(of_tokens(advantages.dr_grpo(reward, ids), mask), mask)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@given(seed=SEEDS)
def test_remax(seed):
    reward, _, mask, token_rewards, columns = groups(seed)
    greedy = columns["advantage"]
    expected, _ = core_algos.compute_remax_outcome_advantage(token_rewards, greedy, mask.double())
    got = of_tokens(advantages.remax(reward, greedy), mask)
    torch.testing.assert_close(got.double(), torch.where(mask, expected, 0.0), rtol=1e-5, atol=1e-6)


@given(seed=SEEDS, gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_gae_also_with_gaps(seed, gamma, lam):
    columns = batch(seed)
    mask = columns["mask"] & (columns["behavior_logprobs"] < -1.1)
    rewards, values = columns["old_logprobs"], columns["reference_logprobs"]
    expected, returns = core_algos.compute_gae_advantage_return(rewards, values, mask.double(), gamma, lam)
    got, got_returns = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(got_returns[mask], returns[mask], **TOLERANCE)
    if mask.sum() > 2:
        whitened = advantages.whitened(got, mask)
        torch.testing.assert_close(whitened[mask].double(), expected[mask], rtol=1e-5, atol=1e-5)


@given(seed=SEEDS)
def test_whitening_with_and_without_the_mean(seed):
    columns = batch(seed)
    values, mask = columns["logprobs"], columns["mask"]
    if mask.sum() > 2:
        expected = masked_whiten(values, mask.double())
        got = advantages.whitened(values, mask)
        torch.testing.assert_close(got[mask].double(), expected[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k1+", "k1_st"), ("k3+", "k3_st")],
)
@given(seed=SEEDS)
def test_kl_estimates(name, estimator, seed):
    columns = batch(seed)
    reference = columns["reference_logprobs"]
    expected = theirs(columns, lambda logprobs: core_algos.kl_penalty(logprobs, reference, name).sum())
    assert_same(theirs(columns, lambda logprobs: kl.kl_estimate(logprobs, reference, estimator).sum()), expected)


@given(st.lists(st.floats(0, 50), max_size=20), st.integers(1, 100))
def test_the_adaptive_coefficient(divergences, samples):
    theirs_now = core_algos.AdaptiveKLController(0.2, 6.0, 1000)
    state = kl.AdaptiveKl(0.2, target=6.0, gain=samples / 1000)
    for divergence in divergences:
        theirs_now.update(divergence, samples)
        state = state.after(divergence)
    assert state.coef == pytest.approx(float(theirs_now.value))


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(seed=SEEDS)
def test_the_value_loss(how, seed):
    columns = batch(seed)
    mask, returns, old = columns["mask"], columns["reference_logprobs"], columns["old_logprobs"]

    def mine(values):
        totals = BatchTotals.of(mask)
        return value_loss(values, mask, totals, returns, old, clip=0.1, aggregation=how, constant=11.0)[0]

    def verls(values):
        settings = {"loss_agg_mode": AGGREGATIONS[how], "loss_scale_factor": 11}
        return core_algos.compute_value_loss(values, returns, old, mask.double(), 0.1, **settings)[0]

    assert_same(theirs(columns, mine), theirs(columns, verls))
