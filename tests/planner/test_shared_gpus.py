"""A run that asks for no GPU takes a part of one, where the vLLM that is installed computes on GPUs alone."""

import io
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.main import main
from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import needed
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import given_keys, load_config
from penstock.orchestrator.configuration.prerequisites import check_packages
from penstock.orchestrator.configuration.resolved import resolve
from penstock.planner import plan_inputs, shared_gpus
from penstock.planner.planned_runs import with_plan
from penstock.planner.shared_gpus import needs_parts, parts_of_gpus
from penstock.serve import command
from penstock.workers.runtime import builds
from penstock.workers.user_code import packaged_recipes

Machine = Callable[..., None]
ENGINE, RANK = "rollout.num_gpus_per_worker", "trainer.num_gpus_per_rank"
COLOCATED = ("placement=colocated", "rollout.num_workers=2", "trainer.num_ranks=2")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(num_gpus, build)`: the node that a run finds, and the device of vLLM's build."""

    def there(num_gpus: int, build: str = "gpu") -> None:
        for module in (shared_gpus, builds):
            monkeypatch.setattr(module, "vllm_build", lambda: (build, f"vllm 0.32.0 for {build}"))
        node = Node("a", "a", "10.0.0.1", 8, num_gpus)
        monkeypatch.setattr(plan_inputs, "look", lambda: [node])

    return there


def planned(*words: str) -> tuple[list[str], str]:
    said = io.StringIO()
    return with_plan(words, Console(file=said, width=500))[len(words) :], said.getvalue()


@pytest.mark.parametrize("words", [["recipe=arithmetic"], ["recipe=gsm8k", "model=tiny"]])
def test_a_small_run_takes_half_a_gpu_for_its_engine_and_half_for_its_rank(words: list[str], machine: Machine) -> None:
    machine(1)
    keys, said = planned(*words)
    assert set(keys) == {f"{ENGINE}=0.5", f"{RANK}=0.5", "plan=never"}
    assert said.startswith("GPUs: vLLM's build is one for GPUs, so the run takes a part of one (")
    before, after = load_config(words), load_config([*words, *keys])
    after.plan, after.rollout.num_gpus_per_worker, after.trainer.num_gpus_per_rank = before.plan, 0, 0
    assert asdict(after) == asdict(before)
    assert planned(*words, *keys) == ([], "")


@pytest.mark.parametrize(("build", "share"), [("gpu", 0.5), ("cpu", 0.0)])
def test_a_server_of_a_small_model_takes_them_as_a_run_does(
    build: str, share: float, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(1, build)
    served: list[RunConfig] = []
    monkeypatch.setattr(command, "serve", lambda config, key, tell: served.append(config))
    assert main(["serve", "model=tiny"]) == 0
    (config,) = served
    assert (config.rollout.num_gpus_per_worker, config.trainer.num_gpus_per_rank) == (share, share)
    assert config.rollout.sampling.max_tokens == 1


@pytest.mark.parametrize(("num_gpus", "build"), [(1, "cpu"), (0, "cpu"), (0, "gpu")])
def test_a_small_run_stays_as_it_is_elsewhere(num_gpus: int, build: str, machine: Machine) -> None:
    machine(num_gpus, build)
    assert planned("recipe=arithmetic") == ([], "")


def test_zeros_that_are_typed_stay_and_are_refused(machine: Machine) -> None:
    machine(1)
    assert planned("recipe=arithmetic", f"{ENGINE}=0") == ([], "")
    run = resolve(load_config(["recipe=arithmetic", f"{ENGINE}=0"]))
    with pytest.raises(ConfigError, match=rf"^{ENGINE}=0: .* is a build for GPUs"):
        check_packages(run.config, run.plan)


@pytest.mark.parametrize("words", [["plan=never"], ["rollout.engine=hf"]])
def test_a_run_that_is_not_planned_or_has_another_engine_takes_none(words: list[str], machine: Machine) -> None:
    machine(1)
    assert planned("recipe=arithmetic", *words) == ([], "")


HALVES = {ENGINE: 0.5, RANK: 0.5}


@pytest.mark.parametrize(
    ("num_gpus", "words", "keys"),
    [
        (1, (), HALVES),
        (1, ("algorithm.kl_coef=0.1",), {ENGINE: 0.5, RANK: 0.25}),
        (1, (f"{RANK}=0",), {ENGINE: 0.5}),
        (1, ("trainer.num_ranks=2",), {ENGINE: 0.5}),
        (1, ("rollout.num_workers=2",), {ENGINE: 0.5}),
        (2, ("rollout.num_workers=2",), HALVES),
        (1, ("rollout.num_workers=3",), {}),
        (2, ("rollout.tensor_parallel_size=2",), {ENGINE: 1.0}),
        (1, ("rollout.tensor_parallel_size=2",), {}),
        (2, COLOCATED, HALVES),
        (1, COLOCATED, {}),
        (2, (*COLOCATED, "rollout.num_workers=1", "rollout.tensor_parallel_size=2"), HALVES),
    ],
)
def test_parts_of_the_gpus_that_are_there(
    num_gpus: int, words: tuple[str, ...], keys: dict[str, Any], machine: Machine
) -> None:
    machine(num_gpus)
    run = resolve(load_config(["recipe=arithmetic", *words]))
    assert needs_parts(run, given_keys(run.config))
    assert parts_of_gpus(run, given_keys(run.config), num_gpus) == (keys and {**keys, "plan": "never"})


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_each_small_recipe_fits_one_gpu(name: str, machine: Machine) -> None:
    machine(1)
    run = resolve(load_config([f"recipe={name}"]))
    if not needs_parts(run, frozenset()):
        assert run.config.rollout.num_gpus_per_worker or not any(actor.role == "rollout" for actor in run.plan)
        return
    keys = parts_of_gpus(run, frozenset(), 1)
    given = resolve(load_config([f"recipe={name}", *(f"{key}={value}" for key, value in keys.items())]))
    assert 0 < needed(given.plan)[1] <= 1
    assign(given.plan, [Node("a", "a", "10.0.0.1", 64, 1)], given.config)
