"""Which command may go on with another's actors: one of the same settings and code, on the same node."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.algorithms.catalogue import build_dataflow
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import sft_loss
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import FleetState
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recovery.takeover import Identity, RunState, TakeoverPoint, identity_of, pack, unpack


def config_of(*words: str) -> RunConfig:
    return load_config(["recipe=arithmetic", "name=sums", *words])


def identity(config: RunConfig, node: str = "node") -> Identity:
    return identity_of(config, build_dataflow(config.algorithm), node)


def state() -> RunState:
    nothing: Any = SimpleNamespace()
    fleet = FleetState([], {"Rollout-0": "Rollout-0.2"}, nothing, nothing, {}, None, {})
    return RunState("namespace", "/model", {}, None, {"rollout": 3}, fleet)


def test_the_same_command_with_resume_is_the_same() -> None:
    first, second = identity(config_of()), identity(config_of("resume=auto"))
    assert second.difference(first) is None
    found = unpack(pack(first, state()), second)
    assert isinstance(found, RunState)
    assert (found.wanted, found.fleet.names) == ({"rollout": 3}, {"Rollout-0": "Rollout-0.2"})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trainer.optimizer.lr=0.5"], "not the same as now: trainer.optimizer.lr"),
        (["seed=7", "max_staleness=1"], "not the same as now: max_staleness, seed"),
        (
            [f"trainer.{key}=2" for key in ("groups_per_step", "num_minibatches", "max_steps", "num_threads")],
            "not the same as now: trainer.groups_per_step, trainer.max_steps, trainer.num_minibatches and 1 more",
        ),
    ],
)
def test_other_settings_are_told_by_their_keys(words: list[str], told: str) -> None:
    found = unpack(pack(identity(config_of(*words)), state()), identity(config_of()))
    assert isinstance(found, str)
    head, _, keys = found.partition(": ")
    expected_head, _, expected_keys = told.partition(": ")
    assert (head, sorted(keys.split(", "))) == (expected_head, sorted(expected_keys.split(", ")))


def test_another_node_is_told_first() -> None:
    assert unpack(pack(identity(config_of("seed=7"), "other"), state()), identity(config_of())) == (
        "it was started on another node"
    )


def test_code_that_was_edited_is_other_code(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def score(response, task):\n    return 1.0\n")
    config = config_of(f"reward.function={file}:score")
    before = identity(config)
    file.write_text("def score(response, task):\n    return 0.0\n")
    assert identity(config).difference(before) == f"not the same as now: {file}"
    file.unlink()
    assert identity(config).difference(before) is not None


@pytest.mark.parametrize("edited", ["losses", "advantages"])
def test_the_code_of_each_policy_is_compared(tmp_path: Path, edited: str) -> None:
    own = {}
    for name in ("losses", "advantages"):
        (tmp_path / f"{name}.py").write_text("def own(reward):\n    return reward\n")
        spec = spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        own[name] = module_from_spec(spec)
        spec.loader.exec_module(own[name])
    flow = Dataflow().rollout("solver", samples_per_prompt=2).reward()
    flow.compute({"solver": abs, "proposer": own["advantages"].own}, reads=["reward"], writes=["advantage"])
    flow.train("solver", loss=sft_loss).train("proposer", loss=own["losses"].own)
    before = identity_of(config_of(), flow, "node")
    (tmp_path / f"{edited}.py").write_text("")
    changed = identity_of(config_of(), flow, "node")
    assert changed.difference(before) == f"not the same as now: {tmp_path / edited}.py"


def test_the_line_of_a_step_is_open_until_it_is_written() -> None:
    made: dict[int, list[Any]] = {4: ["of 4"], 5: ["of 5"], 6: ["made for nothing"]}
    taken = TakeoverPoint.of(5, made, [{"step": 3, "loss": 0.1}])
    assert (taken.step, taken.unwritten, taken.metrics) == (5, {4: ["of 4"], 5: ["of 5"]}, {})
    taken = TakeoverPoint.of(4, made, [{"step": 3}, {"step": 4, "loss": 0.2}])
    assert (taken.unwritten, taken.metrics) == ({}, {"step": 4, "loss": 0.2})
