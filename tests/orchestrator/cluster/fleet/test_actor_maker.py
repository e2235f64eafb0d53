"""What actors are told when they are made."""

import os
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.algorithms.catalogue import dataflow_of
from penstock.orchestrator.cluster.fleet.actor_maker import ActorMaker, Sources
from penstock.orchestrator.cluster.fleet.member_table import MemberTable
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.runtime.processes import ALLOCATOR_SETTINGS, EXPANDABLE
from penstock.workers.trainer import trainer_actor

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
        self.made = options
        return arguments


def test_actors_are_created_in_the_order_of_what_their_loss_costs() -> None:
    """Where memory runs low, Ray ends the newest actors first."""
    config = load_config(["recipe=arithmetic", "algorithm.kl_coef=0.1"])
    roles = [actor.role for actor in plan_actors(dataflow_of(config), config)]
    assert list(dict.fromkeys(roles)) == ["store", "prompts", "trainer", "scorer", "compute", "rollout", "reward"]


def test_an_actor_reserves_the_memory_of_its_plan() -> None:
    config = load_config(["model=tiny", "data.path=x.jsonl"])
    flow, place = dataflow_of(config), Anywhere()
    plan = [replace(actor, memory=4096 if actor.role == "trainer" else 0) for actor in plan_actors(flow, config)]
    table, anywhere = MemberTable(plan, 60.0, cast(Any, place)), cast(Any, place)
    maker = ActorMaker(Sources(config, flow, "/model", "run"), table, anywhere, anywhere, lambda actor: 2, "/run")
    for actor in plan:
        if actor.role in ("trainer", "rollout"):
            maker.make(actor, actor.name)
            assert place.made["memory"] == (4096 if actor.role == "trainer" else None)


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
    maker = ActorMaker(Sources(config, flow, "/model", "run"), table, place, place, lambda actor: 2, "/run")
    trainer = next(actor for actor in plan if actor.role == "trainer")
    (spec,) = maker.make(trainer, trainer.name)
    assert spec.memory_checkpoint_root == ("/run/states/policy" if keeps else None)


@pytest.mark.parametrize(("transport", "expands"), [("shm", True), ("ipc", False)])
def test_memory_that_engines_map_by_handles_is_not_in_segments_that_grow(
    monkeypatch: pytest.MonkeyPatch, transport: str, expands: bool
) -> None:
    shares = ["trainer.num_gpus_per_rank=0.5", "rollout.num_gpus_per_worker=0.5"]
    config = load_config(["model=tiny", "data.path=x.jsonl", *shares, f"weights.transport={transport}"])
    flow, place = dataflow_of(config), cast(Any, Anywhere())
    plan = plan_actors(flow, config)
    maker = ActorMaker(
        Sources(config, flow, "/model", "run"), MemberTable(plan, 60.0, place), place, place, lambda actor: 2, "/run"
    )
    trainer = next(actor for actor in plan if actor.role == "trainer")
    (spec,) = maker.make(trainer, trainer.name)
    assert spec.expands_segments == expands
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(trainer_actor, "check_torch_build", lambda: None)
    trainer_actor.Trainer(spec)
    assert os.environ.pop("PYTORCH_ALLOC_CONF", None) == (EXPANDABLE if expands else None)
