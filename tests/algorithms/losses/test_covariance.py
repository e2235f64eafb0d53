import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses.surrogates import clip_cov, kl_cov, pseudo_random, token_covariance
from penstock.conf.errors import ConfigError
from tests.algorithms.losses.formula import tokens

# means -2 and 0: covariances (1 · 2, 1 · 0, -1 · 0, -1 · -2) = 2, 0, 0, 2
NEW, ADVANTAGE = [-1.0, -1.0, -3.0, -3.0], [2.0, 0.0, 0.0, -2.0]


def test_the_covariance_of_a_token_by_hand():
    mask = torch.tensor([[True, True, True, True, False]])
    new, advantage = torch.tensor([[*NEW, 0.0]]), torch.tensor([[*ADVANTAGE, 0.0]])
    assert token_covariance(new, advantage, mask).tolist() == [[2.0, 0.0, 0.0, 2.0, 0.0]]


def test_clip_cov_drops_tokens_of_large_covariance():
    # half of four tokens may go; two qualify
    values, gradient, metrics = tokens("clip_cov", NEW, NEW, ADVANTAGE, share=0.5)
    assert values == [0.0, 0.0, 0.0, 0.0]
    assert gradient == [0.0, 0.0, 0.0, 0.0]
    assert metrics == {"clip_fraction": [0.0] * 4, "cov_fraction": [1.0, 0.0, 0.0, 1.0]}


def test_clip_cov_drops_no_more_than_its_share_and_at_least_one():
    for share in (0.25, 0.49, 1e-6):
        assert sum(tokens("clip_cov", NEW, NEW, ADVANTAGE, share=share)[2]["cov_fraction"]) == 1.0
    assert tokens("clip_cov", NEW, NEW, ADVANTAGE, share=0.0)[0] == [-2.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize("band", [{"lowest": 2.0}, {"lowest": 0.5, "highest": 2.0}])
def test_clip_cov_leaves_what_is_outside_of_its_band(band):
    assert sum(tokens("clip_cov", NEW, NEW, ADVANTAGE, share=1.0, **band)[2]["cov_fraction"]) == 0.0


def test_what_ppo_has_clipped_already_is_no_candidate():
    # the first token's ratio is e, above 1.2
    old = [-2.0, -1.0, -3.0, -3.0]
    _, gradient, metrics = tokens("clip_cov", NEW, old, ADVANTAGE, share=1.0)
    assert metrics["clip_fraction"] == [1.0, 0.0, 0.0, 0.0]
    assert metrics["cov_fraction"] == [0.0, 0.0, 0.0, 1.0]
    assert gradient == [0.0] * 4


def test_kl_cov_pulls_back_the_tokens_of_largest_covariance():
    # ratio 2: -2 A, and + 0.5 ln 2 for the first and the last; gradient (-2 A + 0.5) / 4
    old = [x - math.log(2) for x in NEW]
    values, gradient, metrics = tokens("kl_cov", NEW, old, ADVANTAGE, share=0.5, coef=0.5)
    assert values == pytest.approx([-4.0 + 0.5 * math.log(2), 0.0, 0.0, 4.0 + 0.5 * math.log(2)])
    assert gradient == pytest.approx([-3.5 / 4, 0.0, 0.0, 4.5 / 4])
    assert metrics == {"cov_fraction": [1.0, 0.0, 0.0, 1.0]}


def test_kl_cov_pulls_towards_the_old_policy_from_either_side():
    # below it, too: |log ρ| falls as log π rises
    _, gradient, _ = tokens("kl_cov", [-2.0], [-1.0], [0.0])
    assert gradient == [-1.0]


def test_kl_cov_without_a_share_is_the_plain_ratio():
    assert tokens("kl_cov", NEW, NEW, ADVANTAGE, share=0.0)[0] == [-2.0, 0.0, 0.0, 2.0]


def test_a_batch_without_a_token_chooses_none():
    nothing, mask = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for formula in (clip_cov, kl_cov):
        values, metrics = formula(nothing, nothing, nothing, mask)
        assert values.isfinite().all()
        assert metrics["cov_fraction"].sum() == 0


@given(st.integers(0, 2**16))
def test_the_dice_are_fair_and_fall_the_same_every_time(seed):
    logprobs = torch.rand(4000, generator=torch.Generator().manual_seed(seed)).log()
    numbers = pseudo_random(logprobs)
    assert torch.equal(numbers, pseudo_random(logprobs))
    assert torch.equal(numbers[seed % 7 :], pseudo_random(logprobs[seed % 7 :])), "wherever it lies in memory"
    assert ((numbers >= 0) & (numbers <= 1)).all()
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.05)
    assert torch.corrcoef(torch.stack([numbers, logprobs]))[0, 1].abs() < 0.1


def test_an_empty_band_is_refused():
    with pytest.raises(ConfigError, match=r"clip_cov: lowest=2.0 is above highest=1.0"):
        tokens("clip_cov", NEW, NEW, ADVANTAGE, lowest=2.0, highest=1.0)
