"""The advantage by roles: each side is compared with what its side mostly gets, from step to step."""

import json
from dataclasses import dataclass

import pytest
import torch

from penstock.algorithms.advantages import RoleBaselines, advantage, role_advantage
from penstock.algorithms.builtin.policy_gradient import policy_gradient
from penstock.conf.algorithms import PolicyGradientConfig
from penstock.conf.errors import ConfigError, DataflowError, ShapeError
from tests.registries import names_for_a_test


@dataclass(frozen=True)
class Counted:
    steps: int = 1


TASKS = [json.dumps({"mark": mark}) for mark in "xox"]


def test_a_roles_first_batch_is_its_baseline_and_later_ones_move_it() -> None:
    advantage, state = role_advantage(torch.tensor([1.0, 0.0, 0.5]), TASKS, role="mark", state=RoleBaselines())
    assert advantage.tolist() == [0.25, 0.0, -0.25]
    assert state.metrics == {"baseline/x": 0.75, "baseline/o": 0.0}
    # x: 0.9 · 0.75 + 0.1 · 0.5 = 0.725; o: 0.9 · 0 + 0.1 · 1 = 0.1
    advantage, state = role_advantage(torch.tensor([0.0, 1.0, 1.0]), TASKS, role="mark", decay=0.9, state=state)
    assert advantage.tolist() == pytest.approx([-0.725, 0.9, 0.275])
    assert dict(state.values) == pytest.approx({"x": 0.725, "o": 0.1})


def test_a_role_that_is_absent_keeps_its_baseline() -> None:
    before = RoleBaselines({"x": 0.5, "o": 0.25})
    _, state = role_advantage(torch.tensor([1.0]), TASKS[:1], role="mark", decay=0.5, state=before)
    assert dict(state.values) == {"x": 0.75, "o": 0.25}


def test_an_environments_task_has_its_role_in_its_data() -> None:
    task = json.dumps({"environment_task": {"id": "1", "seed": 1, "data": {"mark": "o"}}})
    _, state = role_advantage(torch.tensor([0.5]), [task], role="mark", state=RoleBaselines())
    assert dict(state.values) == {"o": 0.5}


def test_a_role_may_be_a_field_of_a_column_or_of_what_reasoning_gym_says() -> None:
    said = {"environment": "sums", "entry": {"metadata": {"num_terms": 3}}, "about": {"side": "left"}}
    for name, value in (("about.side", "left"), ("num_terms", "3")):
        _, state = role_advantage(torch.tensor([0.5]), [json.dumps(said)], role=name, state=RoleBaselines())
        assert dict(state.values) == {value: 0.5}


def test_misfits_are_named() -> None:
    reward, state = torch.zeros(3), RoleBaselines()
    with pytest.raises(DataflowError, match=r"advantage_options\.role=side: a task has no such field.*mark"):
        role_advantage(reward, TASKS, role="side", state=state)
    with pytest.raises(ShapeError, match="task has 2 rows"):
        role_advantage(reward, TASKS[:2], role="mark", state=state)
    with pytest.raises(ConfigError, match="decay=2"):
        role_advantage(reward, TASKS, role="mark", decay=2.0, state=state)


def test_the_dataflow_carries_the_baselines_and_reads_the_task() -> None:
    settings = {"advantage": "rae", "advantage_options": {"role": "mark"}}
    flow = policy_gradient(PolicyGradientConfig(advantage_per="batch", **settings)).check()
    stage = flow.stage("advantage")
    assert stage.reads == ("reward", "task")
    assert stage.state == RoleBaselines()
    with pytest.raises(DataflowError, match="per='batch'"):
        policy_gradient(PolicyGradientConfig(**settings)).check()


def test_an_advantage_of_ones_own_begins_with_its_annotated_state() -> None:
    with names_for_a_test():

        @advantage("counted_of_test")
        def counted(reward: torch.Tensor, *, state: Counted) -> tuple[torch.Tensor, Counted]:
            return reward * state.steps, Counted(state.steps + 1)

        @advantage("unknown_of_test")
        def unknown(reward, *, state):  # type: ignore[no-untyped-def]
            return reward, state

        stage = policy_gradient(PolicyGradientConfig(advantage_per="batch", advantage="counted_of_test")).stage(
            "advantage"
        )
        assert (stage.reads, stage.state) == (("reward",), Counted())
        with pytest.raises(DataflowError, match="advantage=unknown_of_test: annotate its parameter state"):
            policy_gradient(PolicyGradientConfig(advantage_per="batch", advantage="unknown_of_test"))
