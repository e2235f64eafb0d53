"""Who gets which share of the machine."""

from typing import Any

import pytest

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.threads import (
    SharedNode,
    Threads,
    Trial,
    are_tried,
    best,
    counts_to_try,
    shared_nodes,
    threads_of,
    threads_per_worker,
)
from tests.orchestrator.cluster.placement.clusters import node, planned


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
    threads = {
        actor.name: threads_of(actor, actors, assignment, cores, config, {}) for actor in actors if actor.num_cpus
    }
    found = {assignment.node_of[f"Rollout-{i}"].name: threads[f"Rollout-{i}"] for i in range(3)}
    assert found == {"node-2": of_engines[0], "node-3": of_engines[1]}
    assert {threads["Trainer-policy-0"], threads["Trainer-policy-1"]} == {of_rank}
    assert {threads["Scorer-reference-0"], threads["Scorer-reference-1"]} == {of_rank}


def test_what_was_found_for_a_node_holds_for_its_engines_and_ranks_alone() -> None:
    nodes = [node(1, cpus=5), node(2, cpus=1)]
    words = ("rollout.num_workers=2", "algorithm.kl_coef=0.1", "reward.cpus_per_worker=0", "max_staleness=1")
    actors, config = planned(*words)
    assignment = assign(actors, nodes, config)
    cores = {nodes[0].id: 8, nodes[1].id: 8}
    together = next(iter(shared_nodes(actors, assignment, cores)))
    chosen = {together: Threads(rollout=3, trainer=5)}
    threads = {
        actor.name: threads_of(actor, actors, assignment, cores, config, chosen) for actor in actors if actor.num_cpus
    }
    alone = [name for name in ("Rollout-0", "Rollout-1") if assignment.node_of[name].id == nodes[1].id]
    assert threads["Trainer-policy-0"] == 5
    assert {threads[name] for name in ("Rollout-0", "Rollout-1") if name not in alone} == {3}
    assert {threads[name] for name in alone} <= {8}
    assert threads["Scorer-reference-0"] == threads_per_worker("scorer", config, 8, together.engines, 1)


@pytest.mark.parametrize(("engines", "expected"), [(1, Threads(4, 4)), (2, Threads(2, 4)), (4, Threads(1, 4))])
def test_in_turns_engines_share_the_cores_among_themselves(engines: int, expected: Threads) -> None:
    """One engine is 1.6x as fast with twice its threads, as long as there are cores for these. A rank is as fast with 4
    threads as with 2, which is what a synchronous run gives it."""
    trial = Trial(Threads(1, 1), {1: 1.6**2, 2: 1.6, 4: 1.0}, {1: 1.5, 2: 1.0, 4: 1.01})
    assert trial.alone(SharedNode(4, engines, 1)) == expected
    slow = Trial(Threads(1, 1), {1: 1.0, 2: 1.0, 4: 1.3}, {1: 1.0, 2: 1.1, 4: 1.2})
    assert slow.alone(SharedNode(4, 1, 1)) == Threads(2, 1)


def test_nodes_that_are_alike_are_tried_once_and_those_of_one_side_never() -> None:
    """Nodes of one core are never tried either."""
    nodes = [node(number, cpus=2) for number in (1, 2, 3)]
    actors, config = planned("rollout.num_workers=2", "trainer.num_ranks=2", "reward.cpus_per_worker=0")
    assignment = assign(actors, nodes, config)
    placed = {actor.name: assignment.node_of[actor.name].id for actor in actors}
    found = shared_nodes(actors, assignment, {its.id: 4 for its in nodes})
    mixed = {
        node_id
        for node_id in placed.values()
        if {actor.role for actor in actors if placed[actor.name] == node_id} >= {"rollout", "trainer"}
    }
    assert len(found) <= len(mixed)
    for shared, members in found.items():
        assert shared.cores == 4
        assert [actor.role for actor in members] == ["rollout", *["trainer"] * shared.ranks]
    assert shared_nodes(actors, assignment, {its.id: 1 for its in nodes}) == {}


@pytest.mark.parametrize(
    ("words", "tried"),
    [
        ({}, True),
        ({"max_staleness": 0}, False),  # they take turns
        ({"rollout": {"engine": "hf"}}, False),
        ({"rollout": {"num_threads": 1}}, True),
        ({"rollout": {"num_threads": 1}, "trainer": {"num_threads": 2}}, False),
        ({"rollout": {"num_gpus_per_worker": 1}}, False),
        ({"trainer": {"num_gpus_per_rank": 1}}, False),
    ],
)
def test_threads_are_tried_where_both_sides_compute_on_the_same_cpus_at_once(
    words: dict[str, Any], tried: bool
) -> None:
    config = RunConfig(max_staleness=words.get("max_staleness", 1))
    config.rollout.engine = "vllm"
    for part in ("rollout", "trainer"):
        for key, value in words.get(part, {}).items():
            setattr(getattr(config, part), key, value)
    assert are_tried(config) is tried


@pytest.mark.parametrize(
    ("given", "num_cores", "counts"),
    [
        (0, 1, [1]),
        (0, 2, [1, 2]),
        (0, 4, [1, 2, 4]),
        (0, 6, [1, 2, 4, 6]),
        (0, 64, [1, 2, 4, 8, 16, 32, 64]),
        (3, 8, [3]),
    ],
)
def test_numbers_to_try_are_powers_of_two_and_all_cores(given: int, num_cores: int, counts: list[int]) -> None:
    assert counts_to_try(given, num_cores) == counts


@pytest.mark.parametrize(
    ("cores", "engine_s", "rank_s", "found"),
    [
        (2, {1: 1.0, 2: 1.1}, {1: 2.0, 2: 1.1}, (1, 2)),  # a second thread is worth nothing to the engine
        (2, {1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0}, (1, 1)),  # both gain, and there are two cores
        (2, {1: 1.0, 2: 0.6}, {1: 0.2, 2: 0.12}, (2, 1)),
        (2, {1: 1.0, 2: 0.99}, {1: 1.0, 2: 0.99}, (1, 1)),
        (8, {1: 4.0, 2: 2.2, 4: 1.5, 8: 1.4}, {1: 8.0, 2: 4.1, 4: 2.1, 8: 1.2}, (2, 4)),
        (2, {1: 1.0}, {1: 2.0, 2: 1.1}, (1, 2)),  # the engine's number is given
    ],
)
def test_the_best_threads_bring_a_token_soonest_through_both_sides(
    cores: int, engine_s: dict[int, float], rank_s: dict[int, float], found: tuple[int, int]
) -> None:
    assert best(SharedNode(cores, 1, 1), engine_s, rank_s) == found


def test_several_engines_and_ranks_divide_what_has_to_be_done() -> None:
    times = {1: 4.0, 2: 2.0, 4: 1.0}
    assert best(SharedNode(cores=4, engines=2, ranks=2), times, times) == (1, 1)


def test_a_number_that_is_given_later_counts_more_than_one_that_was_found() -> None:
    actors, config = planned("reward.cpus_per_worker=0", "max_staleness=1", "trainer.num_threads=2")
    assignment = assign(actors, [node(1, cpus=8)], config)
    cores = {assignment.node_of["Rollout-0"].id: 4}
    chosen = {SharedNode(4, 1, 1): Threads(rollout=3, trainer=4)}
    threads = {
        actor.name: threads_of(actor, actors, assignment, cores, config, chosen)
        for actor in actors
        if actor.role in ("rollout", "trainer")
    }
    assert threads == {"Rollout-0": 3, "Trainer-policy-0": 2}
