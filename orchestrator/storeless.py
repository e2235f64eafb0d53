"""The actors of a run without its loop and its store: for a session, and for the server of other people's loops."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial

from penstock.orchestrator.cluster.cluster import Cluster, check_placement, namespace_of, while_it_lives
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.orchestrator.cluster.placement.nodes import cluster_nodes
from penstock.orchestrator.configuration.memory_view import resolve_auto
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.orchestrator.run import with_models
from penstock.orchestrator.run_directory.run_directory import RunDirectory


@contextlib.contextmanager
def started_fleet(asked: ResolvedRun, directory: RunDirectory) -> Iterator[Fleet]:
    """Start the actors of a run without a store, and end them on leaving. Raises `ResourceError`, `ModelError` and
    what the first failing actor raised."""
    with contextlib.closing(Cluster(asked.plan, asked.config)) as cluster:
        cluster.connect(directory)
        check_placement(asked.plan, asked.config)
        run = with_models(resolve_auto(asked, cluster_nodes(), partial(print, file=sys.stderr)), directory)
        spill_dir = run.config.store.spill_dir
        agents = NodeAgents(directory.full_name, namespace_of(directory), run.config.cluster, spill_dir)
        fleet = Fleet(run.plan, run.config, run.flow, run.model_path, agents, with_store=False)
        try:
            fleet.create()
            fleet.start()
            yield fleet
        finally:
            while_it_lives(fleet.close)
