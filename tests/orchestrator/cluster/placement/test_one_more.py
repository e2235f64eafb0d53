"""Where one more member goes, and what it is called."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.cluster import ClusterConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.assignment import engines_to_add, next_of, num_more, open_nodes, place_one
from tests.orchestrator.cluster.placement.clusters import node, planned

ENGINE = ActorPlan("Rollout-7", "rollout", num_cpus=1)
REWARD = ActorPlan("Reward-7", "reward", num_cpus=1)


def test_an_engine_goes_where_no_ranks_and_few_engines_are_then_by_most_room() -> None:
    nodes = [node(1, 8), node(2, 2), node(3, 4), node(4, 6)]
    ids = [one.id for one in nodes]
    roles = {ids[0]: ["trainer"], ids[1]: ["rollout"]}
    assert place_one(ENGINE, nodes, roles) == nodes[3]
    roles |= {ids[3]: ["rollout"], ids[2]: ["rollout"]}
    assert place_one(ENGINE, nodes, roles) == nodes[3]
    assert place_one(ENGINE, nodes[:1], roles) == nodes[0]  # beside ranks, where there is nothing else


def test_a_reward_goes_where_engines_are() -> None:
    nodes = [node(1, 8), node(2, 1), node(3, 1)]
    roles = {nodes[1].id: ["rollout", "reward"], nodes[2].id: ["rollout"]}
    assert place_one(REWARD, nodes, roles) == nodes[2]


def test_a_rank_that_has_lost_its_node_goes_where_other_ranks_are() -> None:
    nodes = [node(1, 8), node(2, 2), node(3, 4)]
    rank = ActorPlan("Trainer-policy-1", "trainer", num_cpus=1)
    roles = {nodes[0].id: ["rollout"], nodes[1].id: ["trainer"]}
    assert place_one(rank, nodes, roles) == nodes[1]
    assert place_one(rank, [nodes[0], nodes[2]], roles) == nodes[0]


def test_nodes_that_the_role_may_not_be_on_are_left_alone() -> None:
    nodes = [node(1), node(2, zone="a"), node(3, zone="b")]
    assert open_nodes("rollout", nodes, ClusterConfig(nodes=["node-2", "node-9"])) == [nodes[1]]  # 9 has left
    assert open_nodes("rollout", nodes, ClusterConfig(labels={"rollout": {"zone": "b"}})) == [nodes[2]]


@given(st.lists(st.floats(0, 4).map(lambda cpus: round(cpus, 2)), max_size=5), st.sampled_from([0.5, 1.0, 2.0]))
def test_so_many_fit_as_are_said_to_and_no_more(cpus: list[float], each: float) -> None:
    actor = ActorPlan("Rollout-1", "rollout", num_cpus=each)
    free = [node(number, own) for number, own in enumerate(cpus, 1)]
    expected, placed = num_more(actor, free), 0
    while (place := place_one(actor, free, {})) is not None:
        placed += 1
        free = [node(int(one.id[:2]), one.cpus - each * (one.id == place.id)) for one in free]
    assert placed == expected


def test_a_name_is_never_used_twice() -> None:
    plan, _ = planned("rollout.num_workers=2")
    names = ["Rollout-4", "Reward-9", "Trainer-policy-20"]
    more = next_of(plan, "rollout", "rollout", names)
    assert (more.name, more.stage, more.joins) == ("Rollout-5", "rollout", True)
    assert next_of([*plan, more], "rollout", "rollout", names).name == "Rollout-6"
    assert next_of(plan, "reward", "reward", []).name == "Reward-1"


def test_as_many_engines_are_added_as_there_is_room_and_groups_under_way_for() -> None:
    words = ("rollout.num_workers=auto", "trainer.groups_per_step=4", "max_staleness=1")
    plan, config = planned(*words)
    assert [actor.name for actor in plan if actor.role == "rollout"] == ["Rollout-0"]
    assert engines_to_add(plan, [node(1, 2.5), node(2, 0.5), node(3, 1)], config) == 3
    assert engines_to_add(plan, [node(1, 2.5), node(3, 100)], config) == 7  # 8 groups, one engine is there
    assert engines_to_add(plan, [node(1, 0.5)], config) == 0
    plan, config = planned(*words, "cluster.nodes=[node-1]")
    assert engines_to_add(plan, [node(1, 2), node(3, 100)], config) == 2
    plan, config = planned(*words, "rollout.max_workers=3")
    assert engines_to_add(plan, [node(1, 100)], config) == 2
    assert engines_to_add(plan, [node(1, 0.5)], config, received=1) == 1
