"""Who is asked how fast it is, and who is told by how many threads it computes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.threads import (
    FILE,
    SharedNode,
    Threads,
    Trial,
    read_trials,
    shared_nodes,
    threads_of,
)
from penstock.orchestrator.control.lifecycle import try_threads
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.fakes.actors import FakeHandle
from tests.orchestrator.cluster.placement.clusters import node, planned

SLOW_ENGINE = {1: 4.0, 2: 2.2, 4: 1.2}
SLOW_RANK = {1: 8.0, 2: 4.1, 4: 2.1}


class PlayedFleet:
    """Two engines and two ranks on nodes of so many cores; every call is noted."""

    def __init__(self, *words: str, cores: int = 4, num_nodes: int = 1, trials: dict[SharedNode, Trial] | None = None):
        self.asked: list[tuple[str, str, Any]] = []
        nodes = [node(number, cpus=8 // num_nodes) for number in range(1, num_nodes + 1)]
        sizes = ("rollout.num_workers=2", "trainer.num_ranks=2", "reward.cpus_per_worker=0", "max_staleness=1")
        self.plan, self.config = planned(*sizes, "rollout.engine=vllm", *words)
        self.reservation = SimpleNamespace(assignment=assign(self.plan, nodes, self.config))
        self.cores = {its.id: cores for its in nodes}
        self.trials = dict(trials or {})
        self.actors = {actor.name: self._played(actor.name, actor.role) for actor in self.plan}

    def _played(self, name: str, role: str) -> Any:
        def tried(counts: list[int], groups: int = 0) -> dict[int, float]:
            self.asked.append((name, "try", (tuple(counts), groups) if role == "rollout" else tuple(counts)))
            times = SLOW_ENGINE if role == "rollout" else SLOW_RANK
            return {count: times[count] for count in counts}

        return FakeHandle(try_threads=tried, use_threads=lambda count: self.asked.append((name, "use", count)))

    def role(self, role: str) -> list[tuple[str, Any]]:
        return [(actor.name, self.actors[actor.name]) for actor in self.plan if actor.role == role]

    def threads_of(self, name: str) -> int:
        chosen = {shared: trial.threads for shared, trial in self.trials.items()}
        actor = next(actor for actor in self.plan if actor.name == name)
        return threads_of(actor, self.plan, self.reservation.assignment, self.cores, self.config, chosen)


def tried_by(fleet: PlayedFleet, directory: Path) -> dict[str, list[Any]]:
    try_threads(fleet, RunDirectory(directory))  # type: ignore[arg-type]
    return {kind: [(name, what) for name, its, what in fleet.asked if its == kind] for kind in ("try", "use")}


def test_one_engine_and_all_ranks_are_tried_and_all_are_told(tmp_path: Path) -> None:
    fleet = PlayedFleet("trainer.groups_per_step=8")
    asked = tried_by(fleet, tmp_path)
    counts = (1, 2, 4)
    assert asked["try"] == [
        ("Rollout-0", (counts, 8)),  # two steps' groups at a time, on two engines
        ("Trainer-policy-0", counts),
        ("Trainer-policy-1", counts),
    ]
    ((shared, trial),) = fleet.trials.items()
    assert shared == SharedNode(4, 2, 2)
    assert asked["use"] == [
        *((f"Rollout-{number}", trial.threads.rollout) for number in range(2)),
        *((f"Trainer-policy-{number}", trial.threads.trainer) for number in range(2)),
    ]
    assert read_trials(RunDirectory(tmp_path)) == {shared: Trial(trial.threads, SLOW_ENGINE, SLOW_RANK)}


def test_a_run_that_goes_on_uses_what_it_found_before(tmp_path: Path) -> None:
    first = PlayedFleet()
    tried_by(first, tmp_path)
    again = PlayedFleet(trials=read_trials(RunDirectory(tmp_path)))
    asked = tried_by(again, tmp_path)
    assert asked["try"] == []
    assert asked["use"] == [(name, what) for name, kind, what in first.asked if kind == "use"]


def test_a_number_that_is_given_is_the_only_one_that_is_tried(tmp_path: Path) -> None:
    fleet = PlayedFleet("rollout.num_threads=2", "trainer.groups_per_step=1")
    asked = tried_by(fleet, tmp_path)
    assert asked["try"][0] == ("Rollout-0", ((2,), 1))
    assert {what for name, what in asked["use"] if name.startswith("Rollout")} == {2}


def test_those_that_take_turns_are_neither_tried_nor_told(tmp_path: Path) -> None:
    fleet = PlayedFleet("max_staleness=0")
    assert tried_by(fleet, tmp_path) == {"try": [], "use": []}
    assert not (tmp_path / FILE).exists()


def test_nothing_is_tried_where_each_side_has_nodes_or_a_core_of_its_own(tmp_path: Path) -> None:
    assert tried_by(PlayedFleet(cores=1), tmp_path) == {"try": [], "use": []}


def test_the_record_says_what_was_measured(tmp_path: Path) -> None:
    fleet = PlayedFleet()
    tried_by(fleet, tmp_path)
    (line,) = json.loads((tmp_path / FILE).read_text())
    (shared,) = shared_nodes(fleet.plan, fleet.reservation.assignment, fleet.cores)
    assert {name: line[name] for name in SharedNode._fields} == shared._asdict()
    assert line["s_per_token"]["trainer"] == {str(count): seconds for count, seconds in SLOW_RANK.items()}
    assert Threads(**line["threads"]) == fleet.trials[shared].threads
