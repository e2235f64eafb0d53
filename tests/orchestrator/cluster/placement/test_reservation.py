"""Actors of a run are where the plan says, on nodes of Ray that share this machine: scheduling is real, memory is not
apart."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

from penstock.algorithms.catalogue import build_dataflow
from penstock.conf.errors import ResourceError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.orchestrator.cluster.placement import reservation
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import cluster_nodes, free_nodes
from penstock.orchestrator.cluster.placement.reservation import Reservation
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import with_memory
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.orchestrator.cluster.placement.clusters import planned

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def _nothing_is_reserved(three_nodes: str) -> None:
    """Ray gives resources back some time after a group is removed."""
    deadline = time.monotonic() + 60
    while free_nodes() != cluster_nodes():
        assert time.monotonic() < deadline, free_nodes()
        time.sleep(0.05)


def node_of_this_process(_: object) -> str:
    return str(ray.get_runtime_context().get_node_id())


def test_nodes_are_told_with_what_they_have(three_nodes: str) -> None:
    nodes = cluster_nodes()
    assert nodes[0].id == ray.get_runtime_context().get_node_id()
    assert sorted((node.cpus, node.labels.get("zone", "")) for node in nodes) == [(2, ""), (3, "a"), (3, "b")]
    assert free_nodes() == nodes


def test_every_actor_of_a_fleet_is_on_its_node(three_nodes: str, small_run: list[str], tmp_path: Path) -> None:
    words = ["rollout.engine=hf", "rollout.num_workers=2", "reward.num_workers=2", "algorithm.kl_coef=0.1"]
    config = load_config([*small_run, *words, "cluster.labels.reward={zone: a}", f"output_dir={tmp_path}"])
    flow = build_dataflow(config.algorithm)
    plan = with_memory(ResolvedRun(config, flow, plan_actors(flow, config)), cluster_nodes())
    expected = assign(plan, cluster_nodes(), config)
    assert len(expected.nodes) == 3
    agents = NodeAgents("placed", "placed", config.cluster)
    fleet = Fleet(plan, config, flow, config.model.path, agents)
    try:
        fleet.create()
        handles = {**fleet.actors, "Store": fleet.store}
        calls = [
            handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for handle in handles.values()
        ]
        found = dict(zip(handles, ray.get(calls, timeout=900), strict=True))
        assert found == {name: node.id for name, node in expected.node_of.items()}
        (group,) = (group for group in placement_group_table().values() if group["name"] == "placed")
        reserved = sum(bundle.get("memory", 0.0) for bundle in group["bundles"].values())
        assert reserved == sum(actor.memory for actor in plan) > 0
    finally:
        fleet.close()


def test_a_fleet_that_follows_the_cluster_fills_it_and_gives_back_what_joined(
    three_nodes: str, small_run: list[str], tmp_path: Path
) -> None:
    config = load_config([*small_run, "rollout.engine=hf", "rollout.num_workers=auto", f"output_dir={tmp_path}"])
    flow = build_dataflow(config.algorithm)
    agents = NodeAgents("follows", "follows", config.cluster)
    fleet = Fleet(plan_actors(flow, config), config, flow, config.model.path, agents)
    try:
        fleet.create()
        names = [name for name, _ in fleet.role("rollout")]
        assert names == [f"Rollout-{number}" for number in range(4)]  # groups of a step
        assert len({fleet.capacity.place_of(name) for name in names}) >= 2
        assert fleet.capacity.num_engines_more() == 0
        first = fleet.capacity.place_of("Rollout-0")
        for name in ("Rollout-3", "Rollout-0"):
            asyncio.run(fleet.end(*fleet.take_out(name)))
        assert fleet.capacity.num_engines_more() == 2
        more = [asyncio.run(fleet.capacity.enlarge("rollout", "rollout")) for _ in range(2)]
        assert more == ["Rollout-4", "Rollout-5"]
        assert fleet.capacity.place_of("Rollout-4") == first  # it has what Rollout-0 had
    finally:
        fleet.close()


def test_several_reward_actors_score_what_one_would(three_nodes: str, small_run: list[str], tmp_path: Path) -> None:
    words = [*small_run, "rollout.engine=hf", "rollout.num_workers=2", "trainer.max_steps=2", "trainer.num_threads=1"]
    words += [
        "rollout.num_threads=1",
        f"output_dir={tmp_path}",
        "evaluation.every_steps=2",
        "evaluation.num_problems=8",
    ]
    words += [f"evaluation.path={small_run[1].partition('=')[2]}", f"output_dir={tmp_path}"]
    one, two = (run(load_config([*words, f"reward.num_workers={n}", f"name=by-{n}"]), quiet=True) for n in (1, 2))
    for key in ("reward/mean", "reward/std", "actor/grad_norm", "accuracy/heldout"):
        assert two.outcome.last_metrics[key] == one.outcome.last_metrics[key], key
    placed = next(e for e in RunDirectory.open(two.directory).read_events() if e["kind"] == "placed")["actors"]
    assert placed["Reward-0"] == placed["Rollout-0"] != placed["Reward-1"] == placed["Rollout-1"]


def test_a_second_run_takes_the_nodes_that_are_free(three_nodes: str) -> None:
    actors, config = planned("rollout.num_workers=1", "cluster.cpus_per_worker=2", "reward.cpus_per_worker=0")
    first = Reservation.make(actors, config, "penstock-first-0123abcd-00000000", 60)
    taken = {first.assignment.node_of[actor.name].id for actor in actors if actor.num_cpus}
    assert len(taken) == 2
    free = next(node for node in cluster_nodes() if node.id not in taken)
    little, small = planned("algorithm=sft", "evaluation.every_steps=0", f"cluster.cpus_per_worker={free.cpus}")
    second = Reservation.make(little, small, "penstock-second-0123abcd-00000000", 60)
    assert second.assignment.node_of["Trainer-policy-0"] == free
    first.release()
    second.release()


def test_a_rank_that_has_lost_its_node_has_its_own_room_again_or_another(
    three_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors, config = planned("algorithm=sft", "evaluation.every_steps=0", "cluster.cpus_per_worker=1")
    made = Reservation.make(actors, config, "penstock-moves-0123abcd-00000000", 60)
    rank = next(actor for actor in actors if actor.role == "trainer")
    own = made.assignment.node_of[rank.name]
    try:
        again = made.claim_again(rank, actors, config, "penstock-moves-0123abcd-00000000")
        assert (again.node, again.is_own) == (own, False)  # only the agent was lost there
        made.accept(rank, again)

        with monkeypatch.context() as without:
            free = free_nodes()
            without.setattr(reservation, "cluster_nodes", lambda: [node for node in cluster_nodes() if node != own])
            without.setattr(reservation, "free_nodes", list)
            with pytest.raises(ResourceError, match="No node that trainer may be on has room"):
                made.claim_again(rank, actors, config, "penstock-moves-0123abcd-00000000")
            assert made.assignment.node_of[rank.name] == own
            without.setattr(reservation, "free_nodes", lambda: [node for node in free if node.id != own.id])
            other = made.claim_again(rank, actors, config, "penstock-moves-0123abcd-00000000")
        assert other.is_own
        made.accept(rank, other)
        assert made.assignment.node_of[rank.name].id == other.node.id != own.id
    finally:
        made.release()


def test_a_run_that_finds_the_cluster_taken_waits_and_is_told_who_has_it(
    three_nodes: str, caplog: pytest.LogCaptureFixture
) -> None:
    actors, config = planned("rollout.num_workers=4", "trainer.num_ranks=2", "reward.cpus_per_worker=2")
    first = Reservation.make(actors, config, "penstock-first-0123abcd-00000000", 60)
    with pytest.raises(ResourceError, match=r"not free within 2 s \(.*start_timeout_s\): .*Run first \(0123abcd\) has"):
        Reservation.make(actors, config, "penstock-second-0123abcd-00000000", 2)
    assert "waiting up to 2 s" in caplog.text
    released = threading.Event()

    def release() -> None:
        released.set()
        first.release()

    threading.Timer(3.0, release).start()
    second = Reservation.make(actors, config, "penstock-second-0123abcd-00000000", 60)
    assert released.is_set()
    second.release()


def test_nothing_is_waited_for_that_the_cluster_cannot_hold(three_nodes: str) -> None:
    actors, config = planned("cluster.cpus_per_worker=4")
    with pytest.raises(ResourceError, match="the largest of the cluster's nodes has 3 CPU"):
        Reservation.make(actors, config, "penstock-large-0123abcd-00000000", 60)
