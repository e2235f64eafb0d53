"""Plans and nodes made by hand."""

from penstock.algorithms.catalogue import build_dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_actors
from penstock.orchestrator.cluster.placement.assignment import Assignment, assign
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node
from penstock.orchestrator.configuration.compose import load_config


def node(number: int, cpus: float = 8, gpus: float = 0, **labels: str) -> Node:
    identity = f"{number:02d}" * 28
    return Node(identity, f"node-{number}", f"10.0.0.{number}", cpus, gpus, {NODE_ID: identity, **labels})


def planned(*words: str) -> tuple[list[ActorPlan], RunConfig]:
    config = load_config(words)
    return plan_actors(build_dataflow(config.algorithm), config), config


def assigned(nodes: list[Node], *words: str) -> Assignment:
    actors, config = planned(*words)
    return assign(actors, nodes, config)


def places(assignment: Assignment) -> dict[str, str]:
    """`Rollout-0` -> `node-2`."""
    return {name: its.name for name, its in assignment.node_of.items()}
