import pytest

from penstock.algorithms.catalogue import ALGORITHMS
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.rewrites import in_environment
from penstock.conf.errors import DataflowError

SAMPLED = sorted(name for name, one in ALGORITHMS.items() if one.build(one.config_class()).of_kind("rollout"))


def flow_of(name: str) -> Dataflow:
    return ALGORITHMS[name].build(ALGORITHMS[name].config_class())


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
