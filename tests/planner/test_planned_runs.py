"""Runs on GPUs are split for those that are there, without being asked: placement and memory, and nothing that was
given."""

import io
import json
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console

import penstock
from penstock.algorithms.catalogue import dataflow_of
from penstock.cli.main import main
from penstock.conf.errors import ConfigError, ResourceError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import PLANNED, RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator import run as run_module
from penstock.orchestrator import session as session_module
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration import sweep, validate
from penstock.orchestrator.configuration.compose import given_keys, load_config
from penstock.orchestrator.configuration.recipes import find_recipe, own_keys
from penstock.orchestrator.configuration.resolved import ResolvedRun, resolve
from penstock.orchestrator.configuration.sweep import points_of
from penstock.orchestrator.recovery.takeover import identity_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner import plan_inputs, planned_runs
from penstock.planner.candidates import with_keys
from penstock.planner.planned_runs import with_plan
from tests.planner.table_of_gpus import machines_of

GSM8K = ("recipe=gsm8k",)
Machines = Callable[..., list[Node]]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    """The machines that a run finds."""

    def there(count: int, gpus: int, label: str = "H100") -> list[Node]:
        found = machines_of((count, gpus), label)
        monkeypatch.setattr(plan_inputs, "look", lambda: found)
        return found

    return there


def planned(*words: str) -> tuple[list[str], str]:
    """The words of a run's plan, those it was given left out, and what was said."""
    said = io.StringIO()
    found = with_plan(words, Console(file=said, width=500))
    assert found[: len(words)] == list(words)
    return found[len(words) :], said.getvalue()


def test_one_gpu_is_shared_and_eight_are_used(machines: Machines) -> None:
    machines(1, 1)
    words, said = planned(*GSM8K)
    config = load_config([*GSM8K, *words])
    assert (config.placement, config.trainer.num_ranks, config.rollout.num_workers) == ("colocated", 1, 1)
    assert said.startswith("plan for 1x1:h100: colocated, engines 1, ranks 1, about ")
    assert said.count("\n") == 1
    assert planned(*GSM8K, *words) == ([], ""), "a plan's words are planned no more"
    assign(plan_actors(dataflow_of(config), config), machines(1, 1), config)
    nodes = machines(1, 8)
    words, said = planned(*GSM8K)
    config = load_config([*GSM8K, *words])
    actors = plan_actors(dataflow_of(config), config)
    assert sum(actor.num_gpus for actor in actors) == 8
    assign(actors, nodes, config)


@pytest.mark.parametrize("words", [
    ("recipe=gsm8k", "model=tiny"), ("recipe=gsm8k", "plan=never"), ("recipe=arithmetic",),
    ("recipe=gsm8k", "trainer.num_gpus_per_rank=0", "rollout.num_gpus_per_worker=0"),
])  # fmt: skip
def test_a_run_on_cpus_or_that_is_to_stay_as_it_is_is_not_planned(words: tuple[str, ...], machines: Machines) -> None:
    machines(1, 8)
    assert planned(*words) == ([], "")


def test_a_cluster_that_does_not_answer_is_left_to_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> None:
        raise ResourceError("RAY_ADDRESS=there: the cluster did not answer")

    monkeypatch.setattr(plan_inputs, "look", silent)
    assert planned(*GSM8K) == ([], "")


def test_without_gpus_nothing_is_planned(machines: Machines) -> None:
    machines(1, 0)
    assert planned(*GSM8K) == ([], "")
    with pytest.raises(ConfigError, match="plan"):
        load_config([*GSM8K, "plan=maybe"])


@pytest.mark.parametrize("given", [
    ("trainer.num_ranks=2",), ("rollout.num_workers=2",), ("trainer.offload=false",),
    ("rollout.tensor_parallel_size=2", "trainer.num_ranks=4"), ("rollout.enforce_eager=true",),
    ("max_staleness=1",),
    ("trainer.max_tokens_per_microbatch=2048", "trainer.num_ranks=2", "trainer.sequence_parallel_size=2"),
])  # fmt: skip
def test_keys_that_are_given_stay(given: tuple[str, ...], machines: Machines) -> None:
    machines(1, 8)
    words, said = planned(*GSM8K, *given)
    assert words, said
    keys = {word.partition("=")[0] for word in given}
    assert not keys & {word.partition("=")[0] for word in words}
    before, after = load_config([*GSM8K, *given]), load_config([*GSM8K, *given, *words])
    assert after.max_staleness == before.max_staleness
    assert (after.algorithm, after.data, after.trainer.optimizer) == (
        before.algorithm,
        before.data,
        before.trainer.optimizer,
    )


def test_a_split_that_no_plan_has_is_run_as_the_keys_say(machines: Machines) -> None:
    machines(1, 8)
    words, said = planned(*GSM8K, "rollout.num_workers=99")
    assert words == ["plan=never"]
    assert said.startswith(
        "plan: as the keys say. No split of 1x8:h100 has max_staleness=0 rollout.num_workers=99. One of these would: "
    )


def test_keys_that_fit_nothing_are_left_to_the_checks_of_a_run(machines: Machines) -> None:
    machines(1, 1, "L4")
    large = (*GSM8K, "model.path=Qwen/Qwen2.5-14B")
    with pytest.raises(ResourceError, match="Nothing fits 1x1:l4"):
        planned(*large)
    words, said = planned(*large, "trainer.offload=true")
    assert words == ["plan=never"]
    assert said.startswith("plan: as the keys say. Nothing fits 1x1:l4.")


def test_a_gpu_of_unknown_kind_has_its_own_memory_and_the_speed_of_the_nearest(machines: Machines) -> None:
    machines(1, 2, "G")
    words, said = planned(*GSM8K, "cluster.gpu_memory_gib=22")
    assert "plan for 1x2:G of 22 GiB as fast as a10g:" in said
    assert load_config([*GSM8K, "cluster.gpu_memory_gib=22", *words]).cluster.gpu_memory_gib == 22
    words, said = planned(*GSM8K)
    assert words == ["plan=never"]
    assert "plan: as the keys say. A node has GPUs that are not known here" in said


def test_a_small_model_leaves_gpus_free_that_gain_nothing(machines: Machines) -> None:
    machines(1, 8)
    small = ("recipe=gsm8k", "model=qwen2.5-0.5b", "trainer.groups_per_step=1", "max_staleness=1")
    words, said = planned(*small)
    config = load_config([*small, *words])
    used = sum(actor.num_gpus for actor in plan_actors(dataflow_of(config), config))
    assert f"; {8 - used:g} GPUs stay free: another engine would gain less than 1% (" in said
    assert used < 8


def test_a_run_that_resumes_on_other_gpus_is_planned_anew_and_says_so(machines: Machines, tmp_path: Path) -> None:
    machines(1, 8)
    named = (*GSM8K, "name=mine", f"output_dir={tmp_path}", "resume=auto")
    words, said = planned(*named)
    assert "before" not in said
    RunDirectory.create(load_config([*named, *words])).close()
    again, said = planned(*named)
    assert again == words
    assert "before" not in said
    machines(1, 1)
    words, said = planned(*named)
    assert load_config([*named, *words]).trainer.num_ranks == 1
    assert re.search(r"; the run had another split before: .*trainer\.num_ranks.* differ", said)


def test_a_run_whose_actors_are_there_keeps_its_numbers(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines(1, 8)
    named = (*GSM8K, "name=mine", f"output_dir={tmp_path}", "resume=auto")
    words, _ = planned(*named)
    before = load_config([*named, *words])
    directory = RunDirectory.create(before)
    directory.cluster_file.write_text(json.dumps({"namespace": "penstock-mine-1"}))
    directory.close()
    machines(2, 8)
    asked = list[str]()
    monkeypatch.setattr(planned_runs, "has_owner", lambda namespace: not asked.append(namespace))
    words, said = planned(*named)
    assert asked == ["penstock-mine-1"]
    assert said.startswith("plan: that of mine/config.yaml, whose actors are there (placement=colocated ")
    facts = [identity_of(config, dataflow_of(config), "n0").facts for config in (before, load_config([*named, *words]))]
    assert facts[0] == facts[1]
    monkeypatch.setattr(planned_runs, "has_owner", lambda namespace: False)
    assert planned(*named)[1].startswith("plan for 2x8:h100: ")


class Checked(Exception):
    """The end of a call that would start actors."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations of runs and sessions of Python, as they are checked before they start."""
    found = list[RunConfig]()

    def check(run: ResolvedRun, *rest: object) -> None:
        found.append(run.config)
        assert run.plan == plan_actors(run.flow, run.config)
        raise Checked

    monkeypatch.setattr(run_module, "check_run", check)
    monkeypatch.setattr(session_module, "check_run", check)
    return found


def start_run(*words: str) -> None:
    penstock.run(load_config(words))


def start_session(*words: str) -> None:
    with penstock.session(load_config(words)):
        pass


def start_training(*words: str) -> None:
    penstock.train(**dict(word.split("=") for word in words))


@pytest.mark.parametrize("start", [start_run, start_session, start_training])
def test_runs_and_sessions_of_python_are_planned(
    start: Callable[..., None], machines: Machines, started: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    machines(1, 1)
    with pytest.raises(Checked):
        start(*GSM8K)
    output = capsys.readouterr()
    assert "plan for 1x1:h100: colocated, engines 1, ranks 1, " in output.err + output.out
    with pytest.raises(Checked):
        start(*GSM8K, "plan=never")
    machines(1, 8)
    with pytest.raises(Checked):
        start(*GSM8K, "trainer.num_ranks=2")
    assert [one.placement for one in started] == ["colocated", "disaggregated", "disaggregated"]
    assert started[2].trainer.num_ranks == 2
    assert {one.plan for one in started} == {"never"}


def test_what_a_python_program_changes_stays(machines: Machines, started: list[RunConfig]) -> None:
    machines(1, 8)
    config = load_config(GSM8K)
    config.trainer.num_ranks = 2
    with pytest.raises(Checked):
        penstock.run(config)
    assert started[0].trainer.num_ranks == 2
    made = RunConfig(rollout=RolloutConfig(num_workers=3), trainer=TrainerConfig(num_ranks=5, num_gpus_per_rank=1))
    assert given_keys(made) == {"rollout.num_workers", "trainer.num_ranks"}


def test_keys_of_a_recipe_of_ones_own_stay(machines: Machines, tmp_path: Path) -> None:
    machines(1, 8)
    own = tmp_path / "own"
    own.mkdir()
    (own / "recipe.yaml").write_text(
        "base: gsm8k\ntrainer: {num_ranks: 2, num_gpus_per_rank: 1}\nrollout.num_gpus_per_worker: 1\n"
    )
    assert own_keys(find_recipe(str(own))) == {"base", "trainer.num_ranks"}
    words, _ = planned(f"recipe={own}")
    assert load_config([f"recipe={own}", *words]).trainer.num_ranks == 2
    assert own_keys(find_recipe("geo3k")) == set()


def test_a_plan_changes_no_key_that_changes_results(machines: Machines) -> None:
    machines(1, 8)
    words, _ = planned(*GSM8K, "rollout.num_workers=auto")
    assert not any(word.startswith("rollout.num_workers") for word in words)
    before = load_config([*GSM8K, "trainer.dtype=float32"])
    keys = planned_runs.chosen_keys(resolve(before), lambda text: None)
    after = with_keys(before, keys)
    assert after.trainer.dtype == "float32"
    allowed = {key: attrgetter(key)(before) for key in PLANNED}
    assert with_keys(after, allowed) == before


def test_a_bound_that_no_split_of_one_gpu_has_is_told_with_what_would(machines: Machines) -> None:
    machines(1, 1)
    with pytest.raises(ResourceError) as error:
        planned(*GSM8K, "max_staleness=1")
    assert str(error.value) == (
        "No split of 1x1:h100 has max_staleness=1. One of these would: max_staleness=0; a cluster of 2x1:h100; "
        "a cluster of 1x2:h100."
    )


def test_a_key_that_keeps_a_run_from_fitting_is_among_what_would_fit(machines: Machines) -> None:
    machines(1, 8, "A100-40G")
    _, said = planned(*GSM8K, "model.path=Qwen/Qwen2.5-32B", "trainer.offload=false")
    assert said.startswith("plan: as the keys say. Nothing fits 1x8:a100-40gb. One of these would: ")
    assert "trainer.offload=true" in said


def test_keys_that_a_plan_does_not_count_are_in_its_line(machines: Machines) -> None:
    machines(1, 8)
    assert "not counted" not in planned(*GSM8K)[1]
    said = planned(*GSM8K, "trainer.compile=true", "+rollout.engine_options.quantization=online")[1]
    assert "; not counted: trainer.compile=true, rollout.engine_options.quantization=online (" in said


def test_only_nodes_that_the_run_may_take_are_planned(machines: Machines) -> None:
    nodes = machines(4, 8)
    words, said = planned(*GSM8K, "cluster.nodes=[n1]")
    assert said.startswith("plan for 1x8:h100: ")
    config = load_config([*GSM8K, "cluster.nodes=[n1]", *words])
    assert {node.name for node in assign(plan_actors(dataflow_of(config), config), nodes, config).nodes} <= {"n0", "n1"}


class OneGpu:
    """This machine's driver."""

    def __init__(self, name: str, gib: float) -> None:
        self._name, self._bytes = name, gib * 2**30

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_name(self, index: int) -> str:
        return self._name

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=self._bytes)


@pytest.mark.parametrize(("name", "gib", "told"), [
    ("NVIDIA A100-SXM4-40GB", 39.4, "1x1:a100-40gb"), ("NVIDIA H100 80GB HBM3", 79.1, "1x1:h100"),
    ("NVIDIA Thing 5000", 47.0, "1x1:GPU of 47 GiB as fast as a6000"),
])  # fmt: skip
def test_a_machine_without_a_cluster_has_its_drivers_gpus(
    name: str, gib: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_inputs, "look", lambda: None)
    monkeypatch.setattr(torch, "cuda", OneGpu(name, gib))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * 2**30))
    words, said = planned(*GSM8K, "model.path=Qwen/Qwen2.5-0.5B")
    assert said.startswith(f"plan for {told}: colocated")
    given = [word for word in words if word.startswith("cluster.gpu_memory_gib")]
    assert given == ([] if name.startswith("NVIDIA H100") else [f"cluster.gpu_memory_gib={gib:g}"])
    with pytest.raises(ResourceError, match="Nothing fits"):
        planned(*GSM8K, "model.path=Qwen/Qwen2.5-7B")


def test_nodes_like_this_one_have_the_memory_of_its_driver(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", OneGpu("NVIDIA A100-SXM4-40GB", 39.4))
    machines(2, 8, "A100")
    words, said = planned(*GSM8K)
    assert said.startswith("plan for 2x8:a100-40gb: ")
    assert "cluster.gpu_memory_gib=39.4" in words
    assert planned(*GSM8K, "cluster.gpu_memory_gib=20")[1].startswith("plan for 2x8:a100")
    machines(2, 8, "G")
    assert planned(*GSM8K)[1].startswith("plan for 2x8:G of 39 GiB as fast as a100-40gb: ")


def test_validate_and_sweeps_plan_as_a_run_does(
    machines: Machines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machines(1, 8)
    checked = list[RunConfig]()

    def check(config: RunConfig, console: Console) -> int:
        checked.append(config)
        return 0

    monkeypatch.setattr(validate, "validate_run", check)
    assert main(["validate", *GSM8K]) == 0
    assert "plan for 1x8:h100: " in capsys.readouterr().out
    (config,) = checked
    assert sum(actor.num_gpus for actor in plan_actors(dataflow_of(config), config)) == 8
    monkeypatch.setattr(sweep, "cluster_address", lambda: None)
    monkeypatch.setattr(sweep, "count_local_gpus", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(96))
    points = points_of([*GSM8K, "seed=1,2"])
    assert sweep.jobs_for(points) == 4
    assert sweep.jobs_for(points, lambda words: [*words, *planned(*words)[0]]) == 1
