"""A rank, its engine and its scorer get the same GPU. Ray counts GPUs without looking for them, so two are enough to be
told of."""

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.errors import ConfigError, ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import (
    ActorPlan,
    divide_gpu,
    needed,
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
    ActorPlan("Scorer-reference-0", "scorer", 0.5, 0.25, "reference", 0),
    ActorPlan("Scorer-reference-1", "scorer", 0.5, 0.25, "reference", 1),
    ActorPlan("Scorer-reference-2", "scorer", 0.5, 0.25, "reference", 2),
    ActorPlan("Trainer-policy-0", "trainer", 0.5, 0.25, "train", 0),
    ActorPlan("Trainer-policy-1", "trainer", 0.5, 0.25, "train", 1),
    ActorPlan("Trainer-policy-2", "trainer", 0.5, 0.25, "train", 2),
]
TRAINERS = [f"Trainer-policy-{rank}" for rank in range(3)]
SCORERS = [f"Scorer-reference-{rank}" for rank in range(3)]


def colocated(**more):
    config = RunConfig(**{"placement": "colocated", **more})
    config.trainer.num_gpus_per_rank = config.rollout.num_gpus_per_worker = 0.5
    return config


def names(units):
    return [[actor.name for actor in unit] for unit in units]


def test_rank_i_shares_with_engine_i_and_scorer_i():
    together = [["Rollout-0", SCORERS[0], TRAINERS[0]], ["Rollout-1", SCORERS[1], TRAINERS[1]]]
    assert names(plan_sharing(PLAN, colocated())) == [*together, [SCORERS[2], TRAINERS[2]]]


def test_engines_that_get_weights_in_gpu_memory_share_a_gpu_with_their_rank():
    config = colocated(placement="disaggregated")
    config.weights.transport = "ipc"
    config.trainer.num_ranks = config.rollout.num_workers = 2
    members = [actor for actor in PLAN if actor.name not in (SCORERS[2], TRAINERS[2])]
    assert names(plan_sharing(members, config)) == [
        ["Rollout-0", SCORERS[0], TRAINERS[0]],
        ["Rollout-1", SCORERS[1], TRAINERS[1]],
    ]
    config.weights.transport = "shm"
    assert plan_sharing(members, config) == []


def test_nobody_shares_without_gpus_or_with_devices_of_their_own():
    assert plan_sharing(PLAN, RunConfig()) == []
    without = [ActorPlan(actor.name, actor.role, rank=actor.rank) for actor in PLAN]
    assert plan_sharing(without, colocated()) == []


def test_colocated_scorers_of_cpus_are_no_part_of_a_pair():
    without = [ActorPlan(actor.name, actor.role, rank=actor.rank) for actor in PLAN]
    together = pairs(without, RunConfig(placement="colocated"))
    assert names(together) == [["Rollout-0", TRAINERS[0]], ["Rollout-1", TRAINERS[1]], [TRAINERS[2]]]


def test_engines_ranks_and_scorers_of_one_gpu_start_one_after_the_other():
    teams = [["Store"], ["Rollout-0"], ["Rollout-1"], TRAINERS, SCORERS]
    for placement in ("colocated", "disaggregated"):
        assert start_rounds(teams, PLAN, colocated(placement=placement)) == [teams[:3], [TRAINERS], [SCORERS]]
    assert start_rounds(teams, PLAN, RunConfig()) == [teams]


def planned(*words):
    config = load_config(["recipe=gsm8k", "plan=never", *words])
    return config, plan_actors(dataflow_of(config), config)


EIGHT = ("placement=colocated", "rollout.num_workers=8", "trainer.num_ranks=8", "rollout.num_gpus_per_worker=0.5",
         "trainer.num_gpus_per_rank=0.5")  # fmt: skip
KL = "algorithm.kl_coef=0.01"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_node_of_eight_gpus_holds_ranks_engines_and_a_reference(parts):
    words = (f"rollout.num_workers={8 // parts}", f"rollout.tensor_parallel_size={parts}")
    config, plan = planned(*EIGHT, *words, KL)
    assert needed(plan)[1] == 8
    assignment = assign(plan, [Node("a", "a", "10.0.0.1", 64, 8)], config)
    assert {actor.name for actor in plan} == set(assignment.node_of)
    assert [sum(actor.num_gpus for actor in bundle) for bundle in plan_sharing(plan, config)] == [1.0] * 8
    for bundle in plan_sharing(plan, config):
        assert [actor.role for actor in bundle if actor.role != "rollout"] == ["trainer", "scorer"]
        assert len({actor.rank for actor in bundle}) == 1


def test_a_scorer_is_on_the_node_of_its_rank():
    config, plan = planned(*EIGHT, KL, "rollout.num_workers=4", "rollout.tensor_parallel_size=2")
    nodes = [Node(name, name, f"10.0.0.{index}", 32, 4) for index, name in enumerate("ab", 1)]
    node_of = assign(plan, nodes, config).node_of
    for rank in range(8):
        assert node_of[f"Scorer-reference-{rank}"].id == node_of[f"Trainer-policy-{rank}"].id
        assert node_of[f"Rollout-{rank // 2}"].id == node_of[f"Trainer-policy-{rank}"].id


@given(st.floats(0.01, 1.0), st.integers(0, 5))
def test_a_rank_and_its_scorers_have_the_part_of_the_rank_to_rays_last_digit(part, num_scorers):
    rank, scorer = divide_gpu(part, num_scorers)
    assert round(rank + num_scorers * scorer, 4) == round(part, 4)
    assert scorer == round(scorer, 4)
    assert 0 < scorer <= rank <= part + 5e-5


@pytest.mark.parametrize("own", ["trainer.num_scorer_ranks=1", "trainer.scorer_ranks={reference: 1}"])
def test_a_reference_of_its_own_gpus_may_have_fewer_ranks(own):
    config, plan = planned("trainer.num_ranks=4", "rollout.num_workers=2", own, KL)
    assert needed(plan)[1] == 4 + 2 + 1
    assert [actor.name for actor in plan if actor.role == "scorer"] == ["Scorer-reference-0"]
    assert config.trainer.of_scorer("reference").num_ranks == 1
    assert planned(KL)[0].trainer.of_scorer("reference") == planned(KL)[0].trainer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.num_scorer_ranks=1", *EIGHT], r"a scorer's rank has the GPU of a rank .* Leave it out"),
        (["trainer.scorer_ranks={reference: 1}", *EIGHT], r"scorer_ranks\.reference=1: a scorer's rank has the GPU"),
        (["trainer.scorer_ranks={reference: 0}"], r"trainer\.scorer_ranks\.reference=0"),
        (["trainer.num_ranks=4", "trainer.tensor_parallel_size=2", "trainer.num_scorer_ranks=1"], "must divide"),
    ],
)
def test_ranks_of_scorers_that_cannot_be_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        planned(*words, KL)


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
def test_ray_puts_a_rank_its_engine_and_its_scorer_on_one_gpu_and_gets_it_back(cluster):
    plan, config = [actor for actor in PLAN if actor.rank < 2], colocated()
    reservation = Reservation.make(plan, config, "penstock-first-0123abcd-00000000", 60)
    probes = {
        actor.name: Probe.options(
            num_cpus=actor.num_cpus, num_gpus=actor.num_gpus, **reservation.options(actor)
        ).remote()
        for actor in sorted(plan[1:], key=lambda actor: actor.role)  # Ray would pack the two engines together
    }
    gpus = dict(zip(probes, ray.get([probe.gpus.remote() for probe in probes.values()], timeout=900), strict=True))
    assert gpus["Rollout-0"] == gpus["Trainer-policy-0"] == gpus["Scorer-reference-0"]
    assert gpus["Rollout-1"] == gpus["Trainer-policy-1"] == gpus["Scorer-reference-1"]
    assert gpus["Rollout-0"] != gpus["Rollout-1"]
    with pytest.raises(ResourceError, match="was not free within 1 s"):
        Reservation.make(plan, config, "penstock-late-0123abcd-00000000", 1)
    for probe in probes.values():
        ray.kill(probe)
    reservation.release()
    Reservation.make(plan, config, "penstock-late-0123abcd-00000000", 60).release()
