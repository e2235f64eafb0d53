"""Algorithms by name: every preset builds, and every name in a configuration is checked before anything starts."""

import inspect

import pytest
import torch

from penstock.algorithms.advantages import advantage
from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.catalogue import ALGORITHMS, build_dataflow
from penstock.algorithms.corrections import correction
from penstock.algorithms.losses import surrogate
from penstock.algorithms.losses.preference import dpo_loss, ipo_loss, orpo_loss, simpo_loss
from penstock.conf.algorithms import (
    DapoConfig,
    DpoConfig,
    DrGrpoConfig,
    KtoConfig,
    OnlineDpoConfig,
    OnlineKtoConfig,
    PolicyGradientConfig,
    PpoConfig,
    RemaxConfig,
    RewardModelConfig,
    SftConfig,
)
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig, SamplingConfig
from penstock.conf.run import RunConfig
from tests.registries import names_for_a_test


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_builds_from_a_runs_defaults(name):
    flow = build_dataflow(RunConfig(algorithm=ALGORITHMS[name].config_class()).algorithm_of_run)
    assert flow.of_kind("train")


def dr_grpo_loss(**options):
    """Loss of Dr. GRPO's preset for a right answer of two tokens and a wrong one of four, where the policy has not
    moved: each token's is minus its advantage, 1/2 or -1/2."""
    config = RunConfig(
        algorithm=DrGrpoConfig(), rollout=RolloutConfig(sampling=SamplingConfig(max_tokens=8)), **options
    ).algorithm_of_run
    flow = build_dataflow(config)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    advantage = flow.stage("advantage").function(torch.tensor([1.0, 0.0]))
    logprobs = torch.full((2, 4), -1.0)
    loss, _ = flow.stage("train").function(
        logprobs=logprobs, old_logprobs=logprobs, behavior_logprobs=logprobs, mask=mask, totals=BatchTotals.of(mask),
        advantage=advantage,
    )  # fmt: skip
    return loss.item()


def test_dr_grpo_divides_sums_by_the_longest_response_of_the_run():
    assert dr_grpo_loss() == (-2 * 0.5 + 4 * 0.5) / (2 * 8)
    environment = EnvironmentConfig(name="game", max_tokens=100)
    assert dr_grpo_loss(environment=environment) == pytest.approx(1 / (2 * 100))


def test_a_constant_that_is_given_stays_and_none_outside_of_a_run_is_an_error():
    assert RunConfig(algorithm=DrGrpoConfig(constant_tokens=5)).algorithm_of_run.constant_tokens == 5
    with pytest.raises(ConfigError, match=r"algorithm\.constant_tokens=0: must be greater than 0"):
        build_dataflow(DrGrpoConfig())


def test_dapo_replaces_groups_without_signal_and_shapes_rewards():
    flow = build_dataflow(DapoConfig(overlong_tokens=2, overlong_limit=6))
    assert [stage.reason for stage in flow.of_kind("filter")] == ["no_signal"]
    assert flow.stage("advantage").reads == ("shaped_reward",)
    assert flow.stage("has_signal").reads == ("reward",)


def test_remax_asks_for_a_greedy_answer_and_scores_it():
    flow = build_dataflow(RemaxConfig())
    assert flow.stage("greedy_reward").reads == ("task", "greedy_text")
    assert flow.stage("advantage").reads == ("reward", "greedy_reward")


@pytest.mark.parametrize(("loss", "stages"), [("dpo", True), ("ipo", True), ("simpo", False), ("orpo", False)])
def test_only_losses_that_need_it_start_a_reference(loss, stages):
    assert bool(build_dataflow(DpoConfig(loss=loss)).of_kind("logprobs")) is stages
    assert bool(build_dataflow(OnlineDpoConfig(loss=loss)).of_kind("logprobs")) is stages


@pytest.mark.parametrize(("config", "rows"), [(KtoConfig(), "demonstrations"), (OnlineKtoConfig(), "prompts")])
def test_kto_judges_single_responses_of_a_dataset_or_of_the_policy(config, rows):
    flow = build_dataflow(config)
    assert flow.rows_are == rows
    assert flow.samples_per_prompt == config.group_size
    assert [stage.name for stage in flow.stages][-4:] == ["reward", "good_or_bad", "reference", "train"]
    assert flow.stage("train").takes_groups


@pytest.mark.parametrize(
    ("loss", "function"), [("dpo", dpo_loss), ("ipo", ipo_loss), ("simpo", simpo_loss), ("orpo", orpo_loss)]
)
def test_every_pair_loss_is_a_setting_of_dpo(loss, function):
    trained = build_dataflow(DpoConfig(loss=loss, beta=0.7)).stage("train").function
    assert trained.func is function
    assert 0.7 in trained.keywords.values()


def test_a_kl_term_and_an_entropy_bonus_bring_what_they_need():
    flow = build_dataflow(PolicyGradientConfig(kl_coef=0.1, entropy_coef=0.01))
    assert [stage.name for stage in flow.of_kind("logprobs")] == ["reference"]
    assert build_dataflow(PpoConfig(kl_coef=0.1, reward_model=True)).of_kind("scores")


@pytest.mark.parametrize("config", [PolicyGradientConfig, PpoConfig])
def test_an_interpolated_proximal_policy_needs_staleness_and_no_forward_pass(config):
    flow = build_dataflow(config(proximal="interpolated"))
    assert flow.of_kind("staleness")
    assert "staleness" in flow.stage("train").reads
    assert "old_logprobs" not in inspect.signature(flow.stage("train").function).parameters
    flow = build_dataflow(config())
    assert not flow.of_kind("staleness")
    assert "old_logprobs" in inspect.signature(flow.stage("train").function).parameters
    with pytest.raises(ConfigError, match=r"algorithm.proximal=new: unknown"):
        config(proximal="new")


@names_for_a_test()
def test_ones_own_advantage_surrogate_and_correction_are_found_by_name():
    @advantage("test_best")
    def best(reward, *, top: float = 1.0):
        return top * (reward == reward.max()).float()

    @surrogate("test_push")
    def push(new, old, advantage, mask, *, scale: float = 1.0):
        return -scale * advantage * new, {}

    @correction("test_half")
    def half(old, behavior, mask):
        return 0.5 * mask, {}

    config = PolicyGradientConfig(
        advantage="test_best", advantage_options={"top": 2.0}, surrogate="test_push", correction="test_half"
    )
    flow = build_dataflow(config)
    assert flow.stage("advantage").function.keywords == {"top": 2.0}
    assert flow.stage("train").function.keywords["surrogate"] is push


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolicyGradientConfig(advantage="rlo"), "algorithm.advantage=rlo: unknown; did you mean 'rloo'"),
        (lambda: PolicyGradientConfig(surrogate="gspoo"), "algorithm.surrogate=gspoo: unknown; did you mean 'gspo'"),
        (lambda: PolicyGradientConfig(correction="trunc"), "algorithm.correction=trunc: unknown; did you mean"),
        (lambda: PolicyGradientConfig(surrogate_options={"clip_lo": 1}), "clip_lo: ppo_clip has no such option"),
        (lambda: PolicyGradientConfig(surrogate_options={"clip_low": -1}), "clip_low=-1: must be a finite number"),
        (lambda: PolicyGradientConfig(advantage_options={"eps": "x"}), "eps='x': expected float, not str"),
        (
            lambda: PolicyGradientConfig(advantage="rloo", advantage_options={"foo": 1}),
            "rloo has no such option; it takes",
        ),
        (lambda: PolicyGradientConfig(advantage_per="step"), "algorithm.advantage_per"),
        (lambda: PolicyGradientConfig(overlong_tokens=5), "algorithm.overlong_limit"),
        (lambda: DpoConfig(group_size=3), "algorithm.group_size=3"),
        (lambda: DpoConfig(loss="dppo"), "did you mean 'dpo'"),
        (lambda: KtoConfig(beta=0), "algorithm.beta=0"),
        (lambda: KtoConfig(undesirable_weight=-1), "algorithm.undesirable_weight=-1"),
        (lambda: OnlineDpoConfig(group_size=1), "algorithm.group_size=1"),
        (lambda: RewardModelConfig(group_size=1), "algorithm.group_size=1"),
        (lambda: PpoConfig(lam=1.5), "algorithm.lam=1.5"),
        (lambda: SftConfig(aggregation="mean"), "algorithm.aggregation"),
    ],
)
def test_a_wrong_setting_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        build_dataflow(make())
