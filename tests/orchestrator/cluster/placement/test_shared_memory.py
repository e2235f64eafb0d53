"""Nodes that cannot hold the publications of a run are refused before anything is loaded."""

import pytest

from penstock.conf.errors import ResourceError
from penstock.network.connection import Address
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.assignment import bytes_published, check_room
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.node.node_agent import NodeFacts
from penstock.workers.weights.publication.costs import SharedMemory

PLAN = [ActorPlan("Trainer-0", "trainer"), ActorPlan("Trainer-1", "trainer", rank=1), ActorPlan("Rollout-0", "rollout")]
APART = {"Trainer-0": "a", "Trainer-1": "b", "Rollout-0": "c"}
SIZE = 1000


def node(name: str, total: int, memory: str | None = None) -> NodeFacts:
    shared = SharedMemory(total, 0)
    return NodeFacts(f"node-{name}", Address(f"10.0.0.{name}", 1), 8, memory or name, ("/dev/shm", "/tmp"), shared)


def nodes(a: int, b: int, c: int) -> dict[str, NodeFacts]:
    return {"a": node("a", a), "b": node("b", b), "c": node("c", c)}


def test_engines_need_two_publications_and_ranks_what_they_write() -> None:
    check_room(nodes(1000, 1000, 2000), APART, PLAN, SIZE)


@pytest.mark.parametrize(("sizes", "name"), [((999, 1000, 2000), "a"), ((1000, 1000, 1999), "c")])
def test_a_node_that_is_too_small_is_refused_with_what_mends_it(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ResourceError) as caught:
        check_room(nodes(*sizes), APART, PLAN, SIZE)
    message = str(caught.value)
    assert message.startswith(f"Node node-{name} (10.0.0.{name}) has ")
    for mended_by in ("--shm-size", "sizeLimit", "medium: Memory", "weights.transport=nccl"):
        assert mended_by in message


def test_a_third_publication_has_room_where_versions_are_evaluated_meanwhile() -> None:
    words = ["model=tiny", "data.path=x.jsonl", "rollout.engine=hf", "max_staleness=2", "rollout.num_workers=2"]
    every = "evaluation.every_steps=5"
    counts = [
        load_config([*words, every, more]).num_publications
        for more in ("rollout.num_workers=1", "max_staleness=0", "seed=1")
    ]
    assert (load_config(words).num_publications, *counts) == (2, 2, 2, 3)
    own = load_config([*words, every, "max_staleness=0", "rollout.num_workers=1", "evaluation.num_workers=1"])
    assert own.num_publications == 3
    check_room(nodes(1000, 1000, 3000), APART, PLAN, SIZE, 3)
    with pytest.raises(ResourceError, match=r"^Node node-c .* 3 publications of the weights need 3,000 there"):
        check_room(nodes(1000, 1000, 2999), APART, PLAN, SIZE, 3)


def test_nodes_that_share_their_memory_have_one_file() -> None:
    facts = {name: node(name, 2000, memory="one") for name in "abc"}
    check_room(facts, APART, PLAN, SIZE)


def test_nodes_without_ranks_and_engines_and_runs_without_engines_need_nothing() -> None:
    check_room({**nodes(1000, 1000, 2000), "d": node("d", 0)}, {**APART, "Reward-0": "d"}, PLAN, SIZE)
    check_room(nodes(0, 0, 0), APART, PLAN[:2], SIZE)


@pytest.mark.parametrize("words", [["trainer.lora.rank=8", "trainer.lora.publish=adapter"], []])
def test_adapters_and_models_that_are_not_here_are_not_counted(words: list[str]) -> None:
    config = load_config(["model=tiny", "data.path=x.jsonl", *words])
    assert bytes_published(config, "Qwen/of-the-hub") == 0
