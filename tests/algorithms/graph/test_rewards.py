import pytest
import torch

from penstock.algorithms.builtin.imitation import sft
from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.rewrites import weighted_sum, with_rewards
from penstock.conf.algorithms.base import SftConfig
from penstock.conf.algorithms.policy_gradient import PolicyGradientConfig
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError, DataflowError
from penstock.conf.reward import WeightedRewardConfig
from penstock.conf.run import RunConfig, validate
from penstock.store.data.rows import Rows
from penstock.store.spec import REPORTED_COLUMNS, StoreSpec
from penstock.workers.compute.worker import ComputeWorker

MATH, BREVITY = WeightedRewardConfig("math_verify"), WeightedRewardConfig("own.py:short", 0.5)
GIVEN = WeightedRewardConfig("environment", 2.0)


def run_config(*rewards: WeightedRewardConfig, environment: str | None = None) -> RunConfig:
    return RunConfig(
        algorithm=PolicyGradientConfig(), rewards=list(rewards), environment=EnvironmentConfig(name=environment)
    )


def test_each_reward_is_a_stage_and_their_sum_the_reward() -> None:
    flow = dataflow_of(run_config(MATH, BREVITY))
    assert [stage.name for stage in flow.of_kind("reward")] == ["reward_math_verify", "reward_short"]
    stage = flow.stage("weighted_sum")
    assert stage.reads == ("reward_math_verify", "reward_short")
    rows = Rows.from_lists({"reward_math_verify": [1.0, 0.0], "reward_short": [-2.0, 4.0]})
    assert ComputeWorker(stage, flow.columns).apply(rows) == {"reward": [0.0, 2.0]}


def test_an_environments_reward_is_one_of_them() -> None:
    flow = dataflow_of(run_config(GIVEN, BREVITY, environment="any"))
    assert [stage.name for stage in flow.of_kind("reward")] == ["reward_short"]
    written = [column.name for column in flow.stage("rollout").writes]
    assert "reward_environment" in written
    assert "reward" not in written


def test_every_reward_reaches_the_metrics() -> None:
    config = run_config(GIVEN, BREVITY, environment="any")
    spec = StoreSpec.of(dataflow_of(config), config)
    reads = next(stage.reads for stage in spec.stages if stage.name == "train")
    assert {"reward_environment", "reward_short", "reward", "turn_tokens"} <= set(reads)
    assert set(REPORTED_COLUMNS) <= {*reads, "reward"}


def test_misfits_are_named() -> None:
    with pytest.raises(ConfigError, match="two of them are called 'math_verify'"):
        dataflow_of(run_config(MATH, MATH))
    with pytest.raises(DataflowError, match="asks for 0 rewards"):
        with_rewards(sft(SftConfig()), [MATH])
    with pytest.raises(ConfigError, match=r"Set environment\.name"):
        validate(run_config(GIVEN))


def test_the_sum_is_weighted() -> None:
    values = [torch.tensor([1.0, 0.0]), torch.tensor([4.0, 4.0])]
    assert weighted_sum(values, [1.0, 0.5]).tolist() == [3.0, 2.0]
