"""Who gets which share of the machine."""

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.placement.assignment import assign
from penstock.orchestrator.placement.threads import threads_of, threads_per_worker
from tests.orchestrator.placement.clusters import node, planned


def config_of(max_staleness: int, num_engines: int, num_ranks: int) -> RunConfig:
    config = RunConfig(max_staleness=max_staleness)
    config.rollout.num_workers, config.trainer.num_ranks = num_engines, num_ranks
    return config


@pytest.mark.parametrize(
    ("max_staleness", "num_engines", "num_ranks", "of_engine", "of_rank"),
    [
        (0, 1, 1, 8, 8),
        (0, 2, 1, 4, 8),  # the trainer has the machine to itself while it trains
        (0, 1, 4, 8, 2),
        (1, 1, 1, 4, 4),
        (1, 2, 1, 2, 2),
        (1, 30, 30, 1, 1),
        (0, 30, 1, 1, 8),
    ],
)
def test_those_that_take_turns_divide_the_cores_among_their_own_kind_only(
    max_staleness: int, num_engines: int, num_ranks: int, of_engine: int, of_rank: int
) -> None:
    config = config_of(max_staleness, num_engines, num_ranks)
    assert threads_per_worker("rollout", config, 8, num_engines, num_ranks) == of_engine
    assert threads_per_worker("trainer", config, 8, num_engines, num_ranks) == of_rank
    assert threads_per_worker("scorer", config, 8, num_engines, num_ranks) == of_rank


def test_a_number_that_was_asked_for_is_given() -> None:
    config = config_of(0, 2, 1)
    config.rollout.num_threads, config.trainer.num_threads = 3, 5
    assert [threads_per_worker(role, config, 8, 2, 1) for role in ("rollout", "trainer")] == [3, 5]


@pytest.mark.parametrize(
    ("max_staleness", "of_engines", "of_rank"),
    [(0, [16, 8], 2), (1, [16, 8], 2)],
)
def test_the_cores_are_those_of_the_node_and_so_are_the_workers(
    max_staleness: int, of_engines: list[int], of_rank: int
) -> None:
    """Two ranks and two of a scorer on a node of 4 cores; one engine on 16 cores, two on 17."""
    nodes = [node(1, cpus=4), node(2, cpus=1), node(3, cpus=2)]
    words = ("rollout.num_workers=3", "trainer.num_ranks=2", "algorithm.kl_coef=0.1", "reward.cpus_per_worker=0")
    actors, config = planned(*words, f"max_staleness={max_staleness}")
    assignment = assign(actors, nodes, config)
    cores = dict(zip((its.id for its in nodes), (4, 16, 17), strict=True))
    threads = {actor.name: threads_of(actor, actors, assignment, cores, config) for actor in actors if actor.num_cpus}
    found = {assignment.node_of[f"Rollout-{i}"].name: threads[f"Rollout-{i}"] for i in range(3)}
    assert found == {"node-2": of_engines[0], "node-3": of_engines[1]}
    assert {threads["Trainer-policy-0"], threads["Trainer-policy-1"]} == {of_rank}
    assert {threads["Scorer-reference-0"], threads["Scorer-reference-1"]} == {of_rank}
