"""CPU threads of engines and ranks, from the cores of the node that each is on. Called by `fleet/`."""

from collections.abc import Mapping, Sequence

from penstock.conf.run import RunConfig
from penstock.orchestrator.placement.actors import ActorPlan
from penstock.orchestrator.placement.assignment import Assignment


def threads_of(
    actor: ActorPlan,
    actors: Sequence[ActorPlan],
    assignment: Assignment,
    cores: Mapping[str, int],
    config: RunConfig,
) -> int:
    """`cores`: those that processes may use, by node id. An actor's ranks are those of its stage, on its node."""
    node = assignment.node_of[actor.name]
    here = [other for other in actors if assignment.node_of[other.name].id == node.id]
    engines = sum(other.role == "rollout" for other in here)
    role, stage = (actor.role, actor.stage) if actor.role == "scorer" else ("trainer", "train")
    ranks = sum(other.role == role and other.stage == stage for other in here)
    return threads_per_worker(actor.role, config, cores[node.id], engines, ranks)


def threads_per_worker(role: str, config: RunConfig, num_cores: int, num_engines: int, num_ranks: int) -> int:
    """CPU threads of an engine (`rollout`) or of a rank (`trainer`, `scorer`) on a node with so many.

    With `max_staleness=0` generation and training take turns, so each side divides every core among its own kind;
    otherwise they run at the same time and all share them evenly.
    """
    is_engine = role == "rollout"
    requested = config.rollout.num_threads if is_engine else config.trainer.num_threads
    workers = num_engines if is_engine else num_ranks
    if config.max_staleness > 0:
        workers = num_engines + num_ranks
    return requested or max(1, num_cores // workers)
