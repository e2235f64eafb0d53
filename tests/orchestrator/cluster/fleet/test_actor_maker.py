"""What actors are told when they are made."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.algorithms.catalogue import dataflow_of
from penstock.orchestrator.cluster.fleet.actor_maker import ActorMaker, Sources
from penstock.orchestrator.cluster.fleet.member_table import MemberTable
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.configuration.compose import load_config

GPUS = ["trainer.num_gpus_per_rank=1", "rollout.num_gpus_per_worker=1"]


class Anywhere:
    """Reservations, files and an owner that only note what an actor is made from."""

    def __init__(self) -> None:
        node = SimpleNamespace(id="a", address="10.0.0.1")
        self.assignment = SimpleNamespace(node_of=defaultdict(lambda: node), nodes=[node])

    def options(self, actor: Any) -> dict[str, Any]:
        return {}

    def local(self, node: str, path: str) -> str:
        return path

    def make(self, cls: type, options: Any, *arguments: Any) -> Any:
        return arguments


@pytest.mark.parametrize(
    ("words", "keeps"),
    [
        ([], True),
        (["faults.keep_state=false"], False),
        (GPUS, True),
        ([*GPUS, "weights.transport=nccl"], False),
        (["placement=colocated", "max_staleness=0"], True),
        (["algorithm=sft", "evaluation.every_steps=0"], True),
    ],
)
def test_ranks_keep_copies_where_others_may_take_their_place_alone(words: list[str], keeps: bool) -> None:
    """Elsewhere the death of a rank is a return to the checkpoint, and nobody would read them."""
    config = load_config(["model=tiny", "data.path=x.jsonl", *words])
    flow, place = dataflow_of(config), cast(Any, Anywhere())
    plan = plan_actors(flow, config)
    table = MemberTable(plan, 60.0, place)
    maker = ActorMaker(Sources(config, flow, "/model", "run"), table, place, place, lambda actor: 2, "/states")
    trainer = next(actor for actor in plan if actor.role == "trainer")
    (spec,) = maker.make(trainer, trainer.name)
    assert spec.memory_checkpoint_root == ("/states" if keeps else None)
