"""A rank and its engine get the same GPU. Ray counts GPUs without looking for them, so two are enough to be told of."""

import pytest
import ray

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import (
    ActorPlan,
    pairs,
    plan_actors,
    plan_sharing,
    ranks_of,
    start_rounds,
)
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.cluster.placement.reservation import Reservation
from penstock.orchestrator.configuration.compose import load_config

PLAN = [
    ActorPlan("Store", "store"),
    ActorPlan("Rollout-0", "rollout", 0.5, 0.5, "rollout", 0),
    ActorPlan("Rollout-1", "rollout", 0.5, 0.5, "rollout", 1),
    ActorPlan("Scorer-reference-0", "scorer", 0.5, 0.5, "reference", 0),
    ActorPlan("Trainer-policy-0", "trainer", 0.5, 0.5, "train", 0),
    ActorPlan("Trainer-policy-1", "trainer", 0.5, 0.5, "train", 1),
    ActorPlan("Trainer-policy-2", "trainer", 0.5, 0.5, "train", 2),
]


def colocated(**more):
    config = RunConfig(**{"placement": "colocated", **more})
    config.trainer.num_gpus_per_rank = config.rollout.num_gpus_per_worker = 0.5
    return config


def test_rank_i_shares_with_engine_i_and_scorers_with_nobody():
    shared = [[actor.name for actor in actors] for actors in plan_sharing(PLAN, colocated())]
    assert shared == [["Rollout-0", "Trainer-policy-0"], ["Rollout-1", "Trainer-policy-1"], ["Trainer-policy-2"]]


def test_engines_that_get_weights_in_gpu_memory_share_a_gpu_with_their_rank():
    config = colocated(placement="disaggregated")
    config.weights.transport = "ipc"
    config.trainer.num_ranks = config.rollout.num_workers = 2
    assert [[actor.name for actor in actors] for actors in plan_sharing(PLAN[:-1], config)] == [
        ["Rollout-0", "Trainer-policy-0"],
        ["Rollout-1", "Trainer-policy-1"],
    ]
    config.weights.transport = "shm"
    assert plan_sharing(PLAN[:-1], config) == []


def test_nobody_shares_without_gpus_or_with_devices_of_their_own():
    assert plan_sharing(PLAN, RunConfig()) == []
    without = [ActorPlan(actor.name, actor.role, rank=actor.rank) for actor in PLAN]
    assert plan_sharing(without, colocated()) == []


def test_engines_start_before_the_ranks_that_have_a_part_of_their_gpu():
    teams = [[actor.name] for actor in PLAN[:4]] + [["Trainer-policy-0", "Trainer-policy-1", "Trainer-policy-2"]]
    assert start_rounds(teams, PLAN, colocated(placement="disaggregated")) == [teams[:-1], teams[-1:]]
    assert start_rounds(teams, PLAN, RunConfig()) == [teams]


def parallel(num_engines=2, num_ranks=4):
    config = colocated()
    config.rollout.engine, config.rollout.tensor_parallel_size = "vllm", 2
    config.rollout.num_workers, config.trainer.num_ranks = num_engines, num_ranks
    return config


def test_a_parallel_engine_is_on_the_node_of_the_ranks_whose_gpus_it_has():
    config = parallel()
    plan = plan_actors(dataflow_of(load_config(["model=tiny", "data.path=x.jsonl"])), config)
    gpus = {actor.name: actor.num_gpus for actor in plan if actor.role in ("rollout", "trainer")}
    ranks = [f"Trainer-policy-{rank}" for rank in range(4)]
    assert gpus == {"Rollout-0": 0, "Rollout-1": 0} | dict.fromkeys(ranks, 1)
    assert [[actor.name for actor in unit] for unit in pairs(plan, config)] == [
        [*ranks[:2], "Rollout-0"],
        [*ranks[2:], "Rollout-1"],
    ]
    assert plan_sharing(plan, config) == []
    nodes = [Node("a", "10.0.0.1", "a", 8, 2), Node("b", "10.0.0.2", "b", 8, 3)]
    node_of = {name: node.id for name, node in assign(plan, nodes, config).node_of.items()}
    assert [node_of[name] for name in ("Rollout-0", *ranks[:2])] == ["a"] * 3
    assert [node_of[name] for name in ("Rollout-1", *ranks[2:])] == ["b"] * 3
    (engine,) = (actor for actor in plan if actor.name == "Rollout-1")
    assert ranks_of(engine, plan, config) == ranks[2:]


@ray.remote
class Probe:
    def gpus(self):
        return ray.get_gpu_ids()


@pytest.mark.real
def test_ray_puts_a_rank_and_its_engine_on_one_gpu_and_gets_it_back_afterwards(cluster):
    plan, config = PLAN[:3] + PLAN[4:6], colocated()
    reservation = Reservation.make(plan, config, "penstock-first-0123abcd-00000000", 60)
    probes = {
        actor.name: Probe.options(
            num_cpus=actor.num_cpus, num_gpus=actor.num_gpus, **reservation.options(actor)
        ).remote()
        for actor in sorted(plan[1:], key=lambda actor: actor.role)  # Ray would pack the two engines together
    }
    gpus = dict(zip(probes, ray.get([probe.gpus.remote() for probe in probes.values()], timeout=900), strict=True))
    assert gpus["Rollout-0"] == gpus["Trainer-policy-0"]
    assert gpus["Rollout-1"] == gpus["Trainer-policy-1"]
    assert gpus["Rollout-0"] != gpus["Rollout-1"]
    with pytest.raises(ResourceError, match="was not free within 1 s"):
        Reservation.make(plan, config, "penstock-late-0123abcd-00000000", 1)
    for probe in probes.values():
        ray.kill(probe)
    reservation.release()
    Reservation.make(plan, config, "penstock-late-0123abcd-00000000", 60).release()
