"""The stages that rows pass, with the actors that serve each. Pure but for a look at the fleet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.orchestrator.cluster.fleet.fleet import Fleet

SOURCE = "source"
PROMPTS = "prompts"


@dataclass(frozen=True)
class StageView:
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    members: tuple[str, ...]
    """Actors that serve the stage now."""


def stages_of(flow: Dataflow, fleet: Fleet) -> list[StageView]:
    """Views of the stages, the source first, the train stage last."""
    serving: dict[str, list[str]] = {}
    for actor in fleet.plan:
        if actor.stage is not None and actor.name in fleet.actors:
            serving.setdefault(actor.stage, []).append(actor.name)
    return views_of(flow, serving)


def views_of(flow: Dataflow, serving: Mapping[str, Sequence[str]]) -> list[StageView]:
    """Views of the stages. `serving`: members by stage."""
    stages = [stage for stage in flow.stages if stage.kind in ("source", "train") or not stage.is_in_trainer]
    return [
        StageView(
            stage.name,
            tuple(stage.reads),
            tuple(column.name for column in stage.writes),
            tuple(serving.get(stage.name, ())),
        )
        for stage in stages
    ]


def before(stage: StageView, stages: Sequence[StageView]) -> list[StageView]:
    """Stages that write what a stage reads."""
    return [one for one in stages if one.name != stage.name and set(one.writes) & set(stage.reads)]


def awaited(stages: Sequence[StageView]) -> dict[str, str]:
    """Names of what each member waits for when idle, by member: the stages before its own, or prompts. The members that
    bring the prompts wait for no rows."""
    found: dict[str, str] = {}
    for stage in (one for one in stages if one.name != SOURCE):
        names = [one.name for one in before(stage, stages) if one.name != SOURCE]
        found |= dict.fromkeys(stage.members, " and ".join(names) or PROMPTS)
    return found
