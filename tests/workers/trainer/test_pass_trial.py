"""Costs of passes by trials of few and many tokens."""

import pytest

from penstock.workers.trainer.pass_trial import fit, measure, shapes
from penstock.workers.trainer.update.rank_groups import PassCost

COSTS = {1: PassCost(0.5, 1e-3, 1e-6), 2: PassCost(0.6, 6e-4, 5e-7), 4: PassCost(0.7, 4e-4, 3e-7)}


def seconds(lengths: list[int], size: int) -> float:
    cost = COSTS[size]
    return cost.each + cost.token * sum(lengths) + cost.square * sum(length**2 for length in lengths)


@pytest.mark.parametrize("longest", [256, 2048])
def test_costs_are_found_again(longest: int) -> None:
    found = measure(seconds, [1, 2, 4], longest, deadline_s=1e9)
    for size, cost in COSTS.items():
        assert found[size].each == pytest.approx(cost.each, rel=0.05)
        assert found[size].token == pytest.approx(cost.token, rel=0.05)
        assert found[size].square == pytest.approx(cost.square, rel=0.05)


def test_each_rank_has_as_many_tokens_whatever_the_size() -> None:
    for size in (1, 2, 4):
        few, short, long = shapes(size, 2048)
        assert sum(few) == 2 * size
        assert sum(short) == sum(long) == 2048 * size


def test_trials_that_take_too_long_measure_nothing() -> None:
    assert measure(seconds, [1, 2, 4], 2048, deadline_s=1.0) == {}


def test_noise_makes_no_cost_negative() -> None:
    assert fit(1, 2048, few=3.0, short=2.0, long=1.0) == PassCost(3.0, pytest.approx(0.02 / 2048), 0.0)


def test_no_group_is_taken_to_be_faster_than_its_ranks_alone() -> None:
    found = measure(lambda lengths, size: sum(lengths) / size**2, [1, 2], 1024, deadline_s=1e9)
    assert found[2] == PassCost(found[1].each, found[1].token / 2, 0.0)
