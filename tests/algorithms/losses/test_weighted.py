import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses import SURROGATES
from tests.algorithms.losses.formula import tokens


def one(name, probability, old_probability, advantage, **options):
    got = tokens(name, [math.log(probability)], [math.log(old_probability)], [advantage], **options)
    return got[0][0], got[1][0], {key: shown[0] for key, shown in got[2].items()}


def test_reinforce_is_the_log_likelihood_times_the_advantage():
    # -2 · ln 0.5
    assert one("reinforce", 0.5, 0.1, 2.0) == (pytest.approx(2 * math.log(2)), -2.0, {})


def test_gpg_has_the_loss_of_reinforce():
    assert SURROGATES["gpg"] is SURROGATES["reinforce"]


@pytest.mark.parametrize(
    ("ratio", "weight", "fraction"),
    [(3.0, 1.5, 1.0), (1.2, 1.2, 0.0), (0.1, 0.25, 1.0), (0.5, 0.5, 0.0)],  # bounds [0.25, 1.5]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_every_gradient(ratio, weight, fraction, advantage):
    value, gradient, metrics = one("cispo", 0.2 * ratio, 0.2, advantage, clip_low=0.75, clip_high=0.5)
    assert value == pytest.approx(-weight * advantage * math.log(0.2 * ratio))
    assert gradient == pytest.approx(-weight * advantage)
    assert metrics == {"clip_fraction": fraction}


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999), st.floats(-3, 3))
def test_cispo_without_bounds_is_importance_weighted_reinforce(probability, old_probability, advantage):
    _, gradient, _ = one("cispo", probability, old_probability, advantage, clip_high=1e6)
    assert gradient == pytest.approx(-probability / old_probability * advantage)


@pytest.mark.parametrize(
    ("probability", "old_probability", "advantage", "weight"),
    [
        (0.4, 0.1, 1.0, 0.0),  # moved up by 0.3, as pushed: cut
        (0.4, 0.1, -1.0, 4.0),  # moved up, pushed down: ρ
        (0.1, 0.4, -1.0, 0.0),  # moved down by 0.3, as pushed: cut
        (0.1, 0.4, 1.0, 0.25),
        (1e-3, 1e-5, 1.0, 20.0),  # a ratio of 100 that moves 0.00099: kept, its weight capped
        (0.3, 0.15, 1.0, 2.0),  # moved by 0.15, less than 0.2
    ],
)
def test_dppo_cuts_by_how_far_a_probability_has_moved(probability, old_probability, advantage, weight):
    value, gradient, metrics = one("dppo_tv", probability, old_probability, advantage)
    assert value == pytest.approx(-weight * advantage * math.log(probability))
    assert gradient == pytest.approx(-weight * advantage)
    assert metrics == {"clip_fraction": float(weight == 0.0)}


def test_dppo_takes_its_bounds():
    assert one("dppo_tv", 0.4, 0.1, 1.0, clip_high=0.35)[1] == pytest.approx(-4.0)
    assert one("dppo_tv", 0.1, 0.4, -1.0, clip_low=0.35)[1] == pytest.approx(0.25)
    assert one("dppo_tv", 0.4, 0.1, -1.0, cap=3.0)[1] == pytest.approx(3.0)


@given(st.floats(0.001, 0.999), st.floats(0.001, 0.999), st.floats(-3, 3))
def test_dppo_never_cuts_what_moves_back(probability, old_probability, advantage):
    _, gradient, _ = one("dppo_tv", probability, old_probability, advantage)
    if advantage * (probability - old_probability) < 0:
        assert gradient == pytest.approx(-min(probability / old_probability, 20.0) * advantage)
