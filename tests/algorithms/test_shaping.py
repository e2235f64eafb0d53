from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.graph.functions import Renamed, columns_read
from penstock.algorithms.shaping import has_signal, overlong_reward
from penstock.conf.errors import ConfigError, ShapeError


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1.0, 0.0], True), ([1.0, 1.0], False), ([1.0], False), ([], False)]
)
def test_a_group_that_agrees_has_no_signal(rewards, expected):
    assert has_signal(torch.tensor(rewards)) is expected


def test_long_responses_lose_reward_in_proportion():
    # limit 10, buffer 4: nothing up to 6 tokens, (8 - 6) / 4 = half of it at 8, all of it from 10 on
    tokens = [torch.zeros(length) for length in (3, 6, 8, 10, 15)]
    shaped = overlong_reward(torch.ones(5), tokens, limit=10, buffer=4, penalty=2.0)
    assert shaped.tolist() == [1.0, 1.0, 0.0, -1.0, -1.0]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_a_longer_response_never_has_more_reward(lengths):
    lengths = sorted(lengths)
    shaped = overlong_reward(torch.zeros(len(lengths)), [torch.zeros(n) for n in lengths], limit=20, buffer=5)
    assert (shaped.diff() <= 0).all()
    assert shaped.min() >= -1


def test_bad_bounds_and_lengths_are_named():
    with pytest.raises(ConfigError, match=r"algorithm\.overlong_tokens=0 must lie above 0"):
        overlong_reward(torch.ones(1), [torch.ones(1)], limit=5, buffer=0)
    with pytest.raises(ShapeError, match="response_ids has 1 rows; expected 2"):
        overlong_reward(torch.ones(2), [torch.ones(1)], limit=5, buffer=2)


def test_a_renamed_parameter_reads_another_column():
    def advantage(reward, group_ids, *, scale=1.0):
        return reward * scale

    renamed = Renamed(partial(advantage, scale=2.0), "reward", "shaped_reward")
    assert columns_read(advantage) == ["reward"]
    assert columns_read(renamed) == ["shaped_reward"]
    assert renamed(shaped_reward=3.0, group_ids=None) == 6.0
    assert renamed.__name__ == "advantage"
