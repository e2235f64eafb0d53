import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses import SURROGATES
from penstock.conf.errors import ConfigError
from tests.algorithms.losses.formula import tokens


def one(name, ratio, advantage, **options):
    value, gradient, metrics = tokens(name, [math.log(ratio) - 1], [-1.0], [advantage], **options)
    return value[0], gradient[0], {key: shown[0] for key, shown in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "fraction"),
    [
        (5.0, -1.0, 3.0, 0.0, 1.0),  # -ρ A = 5, held at 3
        (2.0, -1.0, 2.0, 2.0, 0.0),  # below the bound
        (5.0, 1.0, -1.2, 0.0, 0.0),  # A > 0: the ordinary clip alone
        (0.5, -1.0, 0.8, 0.0, 0.0),
        (5.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_dual_clip_holds_the_loss_of_bad_tokens(ratio, advantage, value, gradient, fraction):
    got = one("ppo_clip", ratio, advantage, dual_clip=3.0)
    assert got[0] == pytest.approx(value)
    assert got[1] == pytest.approx(gradient)
    assert got[2]["dual_clip_fraction"] == fraction


def test_without_a_dual_clip_there_is_no_metric_of_it():
    assert set(one("ppo_clip", 1.0, 1.0)[2]) == {"clip_fraction"}


@pytest.mark.parametrize("dual_clip", [0.5, 1.0])
def test_a_dual_clip_must_be_above_one(dual_clip):
    with pytest.raises(ConfigError, match=rf"dual_clip={dual_clip}: must be above 1"):
        one("ppo_clip", 1.0, 1.0, dual_clip=dual_clip)


@given(st.floats(0.05, 20), st.floats(-5, 5))
def test_clip_higher_is_ppo_with_another_bound(ratio, advantage):
    # only where A > 0 and the ratio is above 1.2 does it matter
    narrow, wide = one("ppo_clip", ratio, advantage), one("ppo_clip", ratio, advantage, clip_high=0.28)
    if advantage > 0 and ratio > 1.2:
        assert wide[0] == pytest.approx(-min(ratio, 1.28) * advantage)
    else:
        assert wide == narrow


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "gate"),
    [
        (1.0, 2.0, -4.0, -2.0, 1.0),  # σ(0) = 1/2: value -4 · 1/2 · 2, gradient -A
        # σ(1) = 0.731059: value -4 · 0.731059, gradient -4 · 0.731059 · 0.268941 · 2
        (2.0, 1.0, -2.924234, -1.572895, 0.786448),
        # σ(1.05) = 0.740775: value 4 / 1.05 · 0.740775, gradient 4 · 0.740775 · 0.259225 · 2
        (2.0, -1.0, 2.822000, 1.536218, 0.768109),
        (2.0, 0.0, 0.0, 0.0, 0.768109),
    ],
)
def test_the_soft_gate_by_hand(ratio, advantage, value, gradient, gate):
    got = one("sapo", ratio, advantage)
    assert got[0] == pytest.approx(value, rel=1e-5)
    assert got[1] == pytest.approx(gradient, rel=1e-5)
    assert got[2]["gate_mean"] == pytest.approx(gate, rel=1e-5)


@given(st.floats(0.01, 100), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_soft_gate_never_raises_a_gradient_above_that_of_the_ratio(ratio, positive, negative):
    for advantage in (1.0, -1.0):
        options = {"positive_temperature": positive, "negative_temperature": negative}
        _, gradient, _ = one("sapo", ratio, advantage, **options)
        assert abs(gradient) <= ratio * (1 + 1e-9)
        assert gradient * advantage <= 0


def test_a_surrogate_is_a_plain_function():
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    value, _ = SURROGATES["ppo_clip"](x, x, torch.ones(1, 1), mask)
    assert value.tolist() == [[-1.0]]
