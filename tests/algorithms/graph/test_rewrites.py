import pytest
import torch

from penstock.algorithms.builtin.imitation import sft
from penstock.algorithms.catalogue import (
    ALGORITHMS,
    dataflow_of,
    in_environment,
    weighted_sum,
    with_masked,
    with_rewards,
    with_router_replay,
)
from penstock.algorithms.graph.columns import PROMPT_PICTURES, SEEN_PICTURES, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.algorithms import PolicyGradientConfig, SftConfig
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError, DataflowError
from penstock.conf.reward import WeightedRewardConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig, validate
from penstock.store.data.rows import Rows
from penstock.store.spec import REPORTED_COLUMNS, StoreSpec
from penstock.workers.compute import ComputeWorker

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


@pytest.mark.parametrize("environment", [None, "any"])
def test_experts_go_from_the_rollout_to_the_trainers_and_nowhere_else(environment: str | None) -> None:
    config = run_config(environment=environment)
    config.rollout = RolloutConfig(engine="hf", router_replay=True)
    flow = dataflow_of(config)
    assert flow.columns["routed_experts"] == Column("routed_experts", "uint8", "list")
    assert [stage.name for stage in flow.stages if "routed_experts" in flow.reads_of(stage)] == ["train"]
    (rollout, train) = (next(one for one in StoreSpec.of(flow, config).stages if one.name == name)
                        for name in ("rollout", "train"))  # fmt: skip
    assert "routed_experts" in rollout.writes
    assert "routed_experts" in train.reads
    assert dataflow_of(config, flow).columns == flow.columns
    with pytest.raises(DataflowError, match=r"rollout\.router_replay=true, and the algorithm samples nothing"):
        with_router_replay(sft(SftConfig()))


@pytest.mark.parametrize("environment", [None, "any"])
def test_masked_samples_are_compared_and_leave_before_they_are_trained(environment: str | None) -> None:
    config = run_config(environment=environment)
    config.rollout = RolloutConfig(truncated={"length": "mask", "turns": "mask", "time": "drop"})
    flow = dataflow_of(config)
    assert [stage.name for stage in flow.stages][-3:] == ["advantage", "masked", "train"]
    masked = flow.stage("masked")
    assert masked.reads == ("finish_reason", "advantage")
    reasons = ["stop", "length", "time", "turns"]
    rows = Rows.from_lists({"finish_reason": reasons, "advantage": [1.0, -1.0, 2.0, -2.0]})
    assert ComputeWorker(masked, flow.columns).apply(rows) == {"masked_kept": [True, False, True, False]}
    assert dataflow_of(config, flow).stages == flow.stages


def test_a_masked_sample_stays_until_its_group_has_been_judged() -> None:
    config = run_config()
    config.algorithm.drop_uniform_groups = True
    config.rollout = RolloutConfig(truncated={"length": "mask"})
    flow = dataflow_of(config)
    assert flow.stage("masked").reads == ("finish_reason", "advantage", flow.stage("has_signal").writes[0].name)
    assert flow.stage("has_signal").reads == ("reward",)


@pytest.mark.parametrize(("name", "why"), [
    ("sft", "samples nothing"), ("ppo", "'token_advantage' of the step's whole batch"), ("online_dpo", "compares the"),
])  # fmt: skip
def test_an_algorithm_that_cannot_spare_single_samples_is_refused(name: str, why: str) -> None:
    algorithm = ALGORITHMS[name]
    with pytest.raises(DataflowError, match=rf"rollout\.truncated: mask.*{why}"):
        with_masked(algorithm.build(algorithm.config_class()), ["length"])


def test_pictures_go_wherever_their_tokens_go() -> None:
    config = run_config()
    config.algorithm.kl_coef = 0.1
    assert "pictures" not in dataflow_of(config).columns
    config.rollout.max_pictures = 1
    flow = dataflow_of(config)
    assert {flow.columns[name].per_group for name in PROMPT_PICTURES} == {True}
    assert {column.name for column in flow.stage("source").writes} == {"prompt_ids", "task", *PROMPT_PICTURES}
    readers = [stage.name for stage in flow.stages if set(PROMPT_PICTURES) <= set(flow.reads_of(stage))]
    assert readers == ["rollout", "reference", "train"]
    assert dataflow_of(config, flow).columns == flow.columns


def test_trainers_read_the_pictures_that_were_seen_in_an_environment() -> None:
    config = run_config(environment="any")
    config.algorithm.kl_coef, config.rollout.max_pictures = 0.1, 1
    flow = dataflow_of(config)
    assert {column.name for column in flow.stage("source").writes} == {"task", "pictures"}
    assert [stage.name for stage in flow.stages if "pictures" in flow.reads_of(stage)] == ["rollout"]
    readers = [stage.name for stage in flow.stages if set(SEEN_PICTURES) <= set(flow.reads_of(stage))]
    assert readers == ["reference", "train"]


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


def flow_of(name: str) -> Dataflow:
    one = ALGORITHMS[name]
    return one.build(RunConfig(algorithm=one.config_class()).algorithm_of_run)


SAMPLED = sorted(name for name in ALGORITHMS if flow_of(name).of_kind("rollout"))


@pytest.mark.parametrize("name", sorted({*SAMPLED} - {"remax"}))
def test_every_algorithm_that_samples_runs_in_an_environment(name: str) -> None:
    before, flow = flow_of(name), in_environment(flow_of(name)).check()
    assert flow.has_environment
    assert not before.has_environment
    assert flow.rows_are == "tasks"
    assert "prompt_ids" not in flow.columns
    assert {"context_ids", "spans"} <= set(flow.batch_reads())
    assert flow.samples_per_prompt == before.samples_per_prompt
    assert flow.columns.keys() >= {"reward"} if "reward" in before.columns else True


def test_a_greedy_baseline_is_refused() -> None:
    with pytest.raises(DataflowError, match="greedy response"):
        in_environment(flow_of("remax"))


def test_rows_that_are_not_sampled_are_refused() -> None:
    with pytest.raises(DataflowError, match="samples nothing"):
        in_environment(flow_of("sft"))


def test_a_reward_function_of_its_own_stays() -> None:
    flow = Dataflow().rollout("policy", samples_per_prompt=2).reward()
    flow.reward(lambda response: 1.0, writes="reference_logprobs", name="other")
    assert [stage.name for stage in in_environment(flow).of_kind("reward")] == ["other"]
