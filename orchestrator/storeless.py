"""The actors of a run without its loop and its store: for a session, and for the server of other people's loops."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.cluster import Cluster, check_placement, namespace_of, while_it_lives
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.nodes import cluster_nodes
from penstock.orchestrator.configuration.memory_view import settled, with_memory
from penstock.orchestrator.run import starting_model, with_other_models
from penstock.orchestrator.run_directory.run_directory import RunDirectory


@dataclass(frozen=True)
class StorelessFleet:
    """Actors that have started, and what they were started with."""

    fleet: Fleet
    config: RunConfig
    """The configuration without `auto`, with the paths of all models."""
    model_path: str


@contextlib.contextmanager
def started_fleet(
    config: RunConfig, flow: Dataflow, plan: list[ActorPlan], directory: RunDirectory
) -> Iterator[StorelessFleet]:
    """Start the actors of a plan without a store, and end them on leaving. Raises `ResourceError`, `ModelError` and
    what the first failing actor raised."""
    with contextlib.closing(Cluster(plan, config)) as cluster:
        cluster.connect(directory)
        check_placement(plan, config)
        config = settled(config, flow, plan, cluster_nodes(), partial(print, file=sys.stderr))
        plan = with_memory(config, flow, plan, cluster_nodes())
        model_path = starting_model(config, directory)
        config = with_other_models(config, directory, model_path)
        namespace = namespace_of(directory)
        agents = NodeAgents(directory.full_name, namespace, config.cluster, config.store.spill_dir)
        fleet = Fleet(plan, config, flow, model_path, agents, with_store=False)
        try:
            fleet.create()
            fleet.start()
            yield StorelessFleet(fleet, config, model_path)
        finally:
            while_it_lives(fleet.close)
