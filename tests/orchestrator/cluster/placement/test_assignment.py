"""Every actor of a run gets a node, the same one whenever the cluster is the same, or is refused by its name."""

import re
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import ConfigError, ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan, pairs
from penstock.orchestrator.cluster.placement.assignment import Assignment, Need, Room, assign
from penstock.orchestrator.cluster.placement.nodes import Node, in_order, titles
from tests.orchestrator.cluster.placement.clusters import assigned, node, places, planned


def refused(nodes: list[Node], *words: str) -> str:
    with pytest.raises(ResourceError) as caught:
        assigned(nodes, *words)
    return str(caught.value)


def test_one_node_has_everything() -> None:
    found = assigned([node(1, cpus=3)])
    assert set(places(found).values()) == {"node-1"}
    assert [its.name for its in found.nodes] == ["node-1"]


def test_the_trainer_is_with_the_driver_and_engines_have_the_other_nodes() -> None:
    found = places(assigned([node(2, 2), node(1, 2), node(3, 2)], "rollout.num_workers=2"))
    assert found == {
        "Store": "node-2",
        "Prompts": "node-2",
        "Rollout-0": "node-1",
        "Rollout-1": "node-3",
        "Reward-0": "node-1",
        "Compute-group_advantage": "node-1",
        "Trainer-policy-0": "node-2",
    }


def test_a_driver_without_devices_has_the_store_and_no_more() -> None:
    nodes = [node(1, cpus=4), *(node(number, 16, 8) for number in (2, 3, 4))]
    words = ("trainer.num_ranks=8", "trainer.num_gpus_per_rank=1", "rollout.num_workers=4")
    found = places(assigned(nodes, *words, "rollout.num_gpus_per_worker=1", "rollout.tensor_parallel_size=4"))
    assert {found[f"Trainer-policy-{rank}"] for rank in range(8)} == {"node-2"}
    assert [found[f"Rollout-{index}"] for index in range(4)] == ["node-3", "node-4", "node-3", "node-4"]
    assert found["Store"] == found["Prompts"] == "node-1"


def test_ranks_fill_a_node_in_their_order_and_then_the_next() -> None:
    nodes = [node(1), node(2, 16, 4), node(3, 16, 4), node(4, 16, 4)]
    words = ("trainer.num_ranks=6", "trainer.num_gpus_per_rank=1", "rollout.num_gpus_per_worker=1")
    found = places(assigned(nodes, *words, "rollout.num_workers=4"))
    assert [found[f"Trainer-policy-{rank}"] for rank in range(6)] == ["node-2"] * 4 + ["node-3"] * 2
    assert {found[f"Rollout-{index}"] for index in range(4)} == {"node-4"}


@pytest.mark.parametrize("block", ["trainer.tensor_parallel_size=2", "trainer.shard_size=2"])
def test_ranks_that_split_a_row_or_hold_a_copy_stay_together(block: str) -> None:
    words = ("trainer.num_ranks=4", block, "cluster.labels.trainer={kind: small}")
    small = [node(number, 3, kind="small") for number in (1, 2)]
    found = places(assigned([*small, node(3)], *words))
    assert [found[f"Trainer-policy-{rank}"] for rank in range(4)] == ["node-1", "node-1", "node-2", "node-2"]
    together = places(assigned([node(1, 2), node(2, 8), node(3, 8)], *words[:2]))
    assert {together[f"Trainer-policy-{rank}"] for rank in range(4)} == {"node-2"}, "one node rather than two"


def test_ranks_leave_the_largest_node_to_an_engine_that_needs_it() -> None:
    nodes = [node(1, 32, 8), node(2, 32, 4)]
    words = ("trainer.num_ranks=4", "trainer.num_gpus_per_rank=1", "rollout.num_gpus_per_worker=1")
    found = places(assigned(nodes, *words, "rollout.tensor_parallel_size=8"))
    assert (found["Trainer-policy-3"], found["Rollout-0"]) == ("node-2", "node-1")


def test_engines_share_the_ranks_node_only_when_the_others_are_full() -> None:
    nodes = [node(1, 16, 4), node(2, 16, 4)]
    words = ("trainer.num_ranks=2", "trainer.num_gpus_per_rank=1", "rollout.num_gpus_per_worker=1")
    found = places(assigned(nodes, *words, "rollout.num_workers=6"))
    assert [found[f"Rollout-{index}"] for index in range(6)] == ["node-2"] * 4 + ["node-1"] * 2


def test_rank_i_and_engine_i_take_turns_on_one_node() -> None:
    nodes = [node(1, 8, 2), node(2, 8, 2)]
    words = ("placement=colocated", "trainer.num_gpus_per_rank=0.5", "rollout.num_gpus_per_worker=0.5")
    words += ("trainer.num_ranks=4", "rollout.num_workers=3")
    found = places(assigned(nodes, *words))
    assert [found[f"Trainer-policy-{rank}"] for rank in range(4)] == ["node-1", "node-1", "node-2", "node-2"]
    assert [found[f"Rollout-{index}"] for index in range(3)] == ["node-1", "node-1", "node-2"]
    on_cpus = places(assigned([node(1, 3), node(2, 3)], "placement=colocated", *words[3:4], "trainer.num_ranks=2"))
    assert on_cpus["Trainer-policy-0"] == on_cpus["Rollout-0"]


def test_rewards_are_on_the_engines_nodes_in_turn() -> None:
    nodes = [node(number, 8) for number in (1, 2, 3)]
    found = places(assigned(nodes, "rollout.num_workers=2", "reward.num_workers=4"))
    assert [found[f"Reward-{index}"] for index in range(4)] == ["node-2", "node-3", "node-2", "node-3"]


def test_rewards_go_elsewhere_when_the_engines_nodes_are_full() -> None:
    found = places(assigned([node(1, 4), node(2, 1)], "reward.num_workers=2"))
    assert (found["Rollout-0"], found["Reward-0"], found["Reward-1"]) == ("node-2", "node-1", "node-1")


def test_rows_of_a_dataset_are_judged_where_the_prompts_are() -> None:
    nodes = [node(number, 8) for number in (1, 2)]
    found = places(assigned(nodes, "recipe=kto", "evaluation.every_steps=0"))
    assert found["Reward-0"] == "node-1"


def test_scorers_are_with_the_ranks_rather_than_with_the_engines() -> None:
    nodes = [node(1, 8), node(2, 8)]
    found = places(assigned(nodes, "algorithm.kl_coef=0.1", "trainer.num_ranks=2"))
    assert {found["Scorer-reference-0"], found["Scorer-reference-1"], found["Trainer-policy-0"]} == {"node-1"}
    assert found["Rollout-0"] == "node-2"


def test_labels_and_names_of_nodes_are_kept_to() -> None:
    nodes = [node(1, 8), node(2, 8, accelerator="a100"), node(3, 8, accelerator="h100"), node(4, 8, zone="b")]
    words = ("cluster.labels.rollout={accelerator: a100}", "cluster.labels.trainer.accelerator=h100")
    found = places(assigned(nodes, *words, "cluster.labels.reward={zone: b}"))
    assert [found[name] for name in ("Rollout-0", "Trainer-policy-0", "Reward-0")] == ["node-2", "node-3", "node-4"]
    found = places(assigned(nodes, "cluster.nodes=[node-3,10.0.0.4]"))
    assert set(found.values()) == {"node-1", "node-3", "node-4"}
    assert [name for name, its in found.items() if its == "node-1"] == ["Store", "Prompts"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.nodes=[node-9]"],
         "cluster.nodes: the cluster has no node 'node-9'; did you mean 'node-2'? Known: 10.0.0.1, 10.0.0.2, node-1, "),
        (["cluster.labels.rollout={kind: large}"], "no node has kind=large; did you mean 'kind=larger'?"),
        (["cluster.labels.rollout={kind: larger, zone: a}"],
         "no node has all of them together. node-1 has kind=larger; node-2 has zone=a."),
        (["rollout.num_gpus_per_worker=1", "rollout.tensor_parallel_size=4"],
         "Rollout-0 wants 4 GPU(s) and 1 CPU(s) on one node, and the largest of the cluster's nodes has 2 GPU(s)"),
        (["rollout.num_workers=9"], "The run reserves 11 CPU(s) and the cluster has 6."),
        (["cluster.nodes=[node-2]", "rollout.num_workers=5"], "and what cluster.nodes names has 3"),
        (["cluster.cpus_per_worker=2.5", "reward.cpus_per_worker=1"],
         "Reward-0 wants 1 CPU(s) on one node; the freest of the cluster's nodes has 0.5 CPU(s) left "
         "(node-1), beside others of the run. Lower reward.num_workers, reward.judge.num_gpus or "
         "reward.cpus_per_worker (0 reserves none)"),
        (["trainer.num_ranks=4", "cluster.labels.trainer={zone: a}"],
         "Trainer-policy-0 to Trainer-policy-3: 4 times 1 CPU(s), each on one node, and the nodes with {zone: a} "
         "(cluster.labels.trainer) have room for 3 (node-2 3). Lower trainer.num_ranks"),
        (["placement=colocated", "cluster.labels={trainer: {zone: a}, rollout: {kind: larger}}"],
         "Mend cluster.labels.trainer or cluster.labels.rollout."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(words: list[str], message: str) -> None:
    assert message in refused([node(1, 3, 2, kind="larger"), node(2, 3, 2, zone="a")], *words)


def test_labels_are_for_roles_that_can_be_placed() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.labels\.rolout: .*did you mean 'rollout'"):
        planned("cluster.labels.rolout={zone: a}")


def test_nodes_are_told_apart_by_what_they_differ_in() -> None:
    one, two = node(1), node(2)
    same_name = Node("ab" * 28, "node-1", "10.0.0.9")
    same_machine = Node("cd" * 28, "node-1", "10.0.0.1")
    assert titles([one, two])[one.id] == "node-1"
    assert titles([one, same_name])[one.id] == "node-1 (10.0.0.1)"
    assert titles([one, same_machine])[same_machine.id] == "node-1 (cdcdcdcd)"
    ordered = in_order([node(10), node(9), one, two], driver=two.id)
    assert [its.address for its in ordered] == ["10.0.0.2", "10.0.0.1", "10.0.0.9", "10.0.0.10"]


SHARES = st.sampled_from([0, 0.5, 1, 2])


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    sizes = draw(st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0, 1, 2, 4])), min_size=1, max_size=5))
    return [node(number, cpus, gpus) for number, (cpus, gpus) in enumerate(sizes, 1)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[ActorPlan], RunConfig]:
    config = RunConfig(placement=draw(st.sampled_from(["disaggregated", "disaggregated", "colocated"])))
    trainer, rollout = config.trainer, config.rollout
    trainer.num_ranks, rollout.num_workers = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    trainer.tensor_parallel_size = draw(st.sampled_from([1, trainer.num_ranks]))
    trainer.num_gpus_per_rank, rollout.num_gpus_per_worker = draw(SHARES), draw(SHARES)
    if config.placement == "colocated":
        trainer.num_gpus_per_rank = rollout.num_gpus_per_worker = draw(st.sampled_from([0, 0.5]))
    cpus, gpus = draw(st.sampled_from([0, 0.1, 1, 2])), trainer.num_gpus_per_rank
    reward_cpus, num_rewards, num_scorers = draw(SHARES), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    actors = [ActorPlan("Store", "store"), ActorPlan("Prompts", "prompts")]
    for index in range(rollout.num_workers):
        actors.append(ActorPlan(f"Rollout-{index}", "rollout", cpus, rollout.num_gpus_per_worker, "rollout", index))
    actors += [ActorPlan(f"Reward-{index}", "reward", reward_cpus, stage="reward") for index in range(num_rewards)]
    for stage in range(num_scorers):
        for rank in range(trainer.num_ranks):
            actors.append(ActorPlan(f"Scorer-{stage}-{rank}", "scorer", cpus, gpus, f"scored-{stage}", rank))
    actors += [ActorPlan("Compute", "compute")]
    for rank in range(trainer.num_ranks):
        actors.append(ActorPlan(f"Trainer-{rank}", "trainer", cpus, gpus, "train", rank))
    return actors, config


def check(assignment: Assignment, actors: list[ActorPlan], nodes: list[Node], config: RunConfig) -> None:
    assert list(assignment.node_of) == [actor.name for actor in actors]
    assert {name for its in assignment.nodes for name in assignment.names_on(its)} == set(assignment.node_of)
    assert {assignment.node_of[name] for name in ("Store", "Prompts")} == {nodes[0]}
    for its in nodes:
        there = set(assignment.names_on(its))
        units = pairs(actors, config)
        together = {actor.name for unit in units for actor in unit}
        units = [*units, *([actor] for actor in actors if actor.name not in together)]
        needs = [Need.of(unit) for unit in units if unit and unit[0].name in there]
        assert Room.of(its).with_all(sorted(needs, key=lambda need: -need.gpus)) is not None
    for unit in pairs(actors, config):
        assert len({assignment.node_of[actor.name].id for actor in unit}) == 1
    for gang in ("Trainer-", *(f"Scorer-{stage}-" for stage in range(2))):
        ranks = [its.id for name, its in assignment.node_of.items() if name.startswith(gang)]
        assert len([key for key, _ in groupby(ranks)]) == len(set(ranks)), "ranks of a node are next to each other"


@given(clusters(), plans(), st.randoms(use_true_random=False))
def test_every_actor_has_one_node_and_no_node_more_than_it_holds(nodes, plan, random):
    actors, config = plan
    others = nodes[1:]
    random.shuffle(others)
    outcomes = []
    for cluster in (nodes, [nodes[0], *others]):
        try:
            outcomes.append(assign(actors, cluster, config))
        except ResourceError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1], "the order of the nodes says nothing"
    if isinstance(outcomes[0], str):
        assert re.search(r"Lower [a-z]+\.", outcomes[0]), outcomes[0]
    else:
        check(outcomes[0], actors, nodes, config)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_nodes_alike_hold_whatever_they_can_hold(num_nodes, num_ranks, num_engines, width):
    """Nodes of 8 GPUs: ranks of one, engines of `width`. As many engines as there can be, and then the ranks."""
    engines_a_node = 8 // width
    num_engines = min(num_engines, num_nodes * engines_a_node)
    num_ranks = min(num_ranks, num_nodes * 8 - num_engines * width)
    if not num_ranks:
        return
    actors = [ActorPlan(f"Rollout-{index}", "rollout", 0, width, "rollout", index) for index in range(num_engines)]
    actors += [ActorPlan(f"Trainer-{rank}", "trainer", 0, 1, "train", rank) for rank in range(num_ranks)]
    assign(actors, [node(number, 8, 8) for number in range(num_nodes)], RunConfig())
