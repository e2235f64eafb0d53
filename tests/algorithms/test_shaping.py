"""Shaping of rewards: groups without a signal, long responses, and a KL penalty whose coefficient stays or follows a
target."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.builtin.policy_gradient import (
    has_signal,
    next_coefficient,
    overlong_reward,
    penalized_reward,
    response_kl,
)
from penstock.algorithms.catalogue import build_dataflow
from penstock.algorithms.graph.stage import ParameterAlias, columns_read
from penstock.algorithms.kl import AdaptiveKl
from penstock.conf.algorithms import PolicyGradientConfig, PpoConfig, RlooConfig
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

    renamed = ParameterAlias(partial(advantage, scale=2.0), "reward", "shaped_reward")
    assert columns_read(advantage) == ["reward"]
    assert columns_read(renamed) == ["shaped_reward"]
    assert renamed(shaped_reward=3.0, group_ids=None) == 6.0
    assert renamed.__name__ == "advantage"


OWN = [torch.tensor([-1.0, -1.0]), torch.tensor([-0.5]), torch.tensor([])]
REFERENCE = [torch.tensor([-2.0, -1.5]), torch.tensor([-0.25]), torch.tensor([])]
# log-ratios of the responses: 1 + 0.5 = 1.5, -0.25, 0
ADAPTIVE = {"kl_coef": 0.1, "kl_in": "reward", "kl_target": 2.0, "advantage_per": "batch"}


def test_the_penalty_is_the_log_ratio_of_the_response():
    reward = penalized_reward(torch.tensor([1.0, 1.0, 2.0]), OWN, REFERENCE, 0.5)
    assert reward.tolist() == [0.25, 1.125, 2.0]
    reward = penalized_reward(torch.tensor([1.0, 1.0, 2.0]), OWN, REFERENCE, torch.tensor([1.0, 2.0, 3.0]))
    assert reward.tolist() == [-0.5, 1.5, 2.0]


def test_the_step_uses_its_coefficient_and_the_next_one_has_seen_it():
    # mean divergence (1.5 - 0.25 + 0) / 3 = 0.416667; / 0.4 - 1 = 0.041667; coef · (1 + 0.1 · 0.041667)
    coef, state = next_coefficient(OWN, REFERENCE, state=AdaptiveKl(0.5, target=0.4))
    assert coef.tolist() == [0.5, 0.5, 0.5]
    assert state.coef == pytest.approx(0.5 * 1.0041667)
    assert state.kl == pytest.approx(0.4166667)


@given(st.lists(st.lists(st.floats(-5, 0, width=32), max_size=5), min_size=1, max_size=6))
def test_a_policy_that_is_its_reference_pays_nothing(rows):
    logprobs = [torch.tensor(row) for row in rows]
    reward = torch.arange(float(len(rows)))
    assert torch.equal(penalized_reward(reward, logprobs, logprobs, 3.0), reward)
    assert response_kl(logprobs, logprobs).tolist() == [0.0] * len(rows)


def test_a_log_ratio_out_of_all_bounds_costs_at_most_twenty_nats_a_token():
    assert penalized_reward(torch.zeros(1), [torch.tensor([0.0])], [torch.tensor([-1000.0])], 1.0).tolist() == [-20.0]


def test_what_does_not_fit_is_named():
    with pytest.raises(ShapeError, match="reference_logprobs has 2 rows; expected 3, as many as behavior_logprobs"):
        penalized_reward(torch.zeros(3), OWN, REFERENCE[:2], 0.5)
    with pytest.raises(
        ShapeError, match=r"reward is float64 \[2\]; expected \[3\], the shape of behavior_logprobs' rows"
    ):
        penalized_reward(torch.zeros(2), OWN, REFERENCE, 0.5)
    with pytest.raises(ShapeError, match=r"reference_logprobs is float32 \[1\]; expected \[2\], the shape of logprobs"):
        response_kl(OWN[:1], REFERENCE[1:2])


def test_a_fixed_penalty_waits_for_no_batch():
    flow = build_dataflow(RlooConfig(kl_coef=0.1, kl_in="reward", overlong_tokens=1, overlong_limit=4))
    stage = flow.stage("penalized_reward")
    assert stage.unit == "sample"
    assert stage.reads == ("shaped_reward", "behavior_logprobs", "reference_logprobs")
    assert flow.stage("advantage").reads == ("penalized_reward",)
    assert flow.stage("train").function.keywords["kl_coef"] == 0.0
    columns = {"shaped_reward": torch.tensor([1.0]), "behavior_logprobs": OWN[:1], "reference_logprobs": REFERENCE[:1]}
    assert stage.function(**columns).tolist() == pytest.approx([0.85])


def test_an_adaptive_penalty_is_a_state_of_the_trainers():
    flow = build_dataflow(PolicyGradientConfig(**ADAPTIVE))
    assert [stage.name for stage in flow.in_trainer] == ["next_coefficient", "penalized_reward", "advantage"]
    assert flow.stage("next_coefficient").state == AdaptiveKl(0.1, 2.0, 0.1)
    flow = build_dataflow(PpoConfig(kl_coef=0.2, kl_target=3.0, kl_gain=0.5))
    assert flow.stage("next_coefficient").state == AdaptiveKl(0.2, 3.0, 0.5)
    assert "kl_coef" in flow.stage("ppo_advantages").reads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_coef": 0.0}, "algorithm.kl_coef=0.0: must be greater than 0"),
        ({"kl_in": "loss"}, "algorithm.kl_target=2.0 with algorithm.kl_in=loss: .* Set algorithm.kl_in=reward"),
        ({"advantage_per": "group"}, "with algorithm.advantage_per=group: .* Set algorithm.advantage_per=batch"),
        ({"kl_in": "rewards"}, "algorithm.kl_in=rewards: unknown; did you mean 'reward'"),
        ({"kl_target": -1.0}, "algorithm.kl_target=-1.0: must be at least 0"),
    ],
)
def test_a_controller_without_what_it_needs_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        PolicyGradientConfig(**(ADAPTIVE | changes))


def test_ppos_controller_needs_a_coefficient_to_start_from():
    with pytest.raises(ConfigError, match=r"algorithm.kl_coef=0.0: must be greater than 0"):
        PpoConfig(kl_target=1.0)
