"""The parts of a run that every other part works with."""

from dataclasses import dataclass

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.client.store_client import StoreClient


@dataclass(frozen=True)
class RunContext:
    """A fleet that has started, with its store, and what the run is and writes to."""

    config: RunConfig
    flow: Dataflow
    fleet: Fleet
    store: StoreClient
    directory: RunDirectory
    progress: ProgressDisplay

    @classmethod
    def of(cls, config: RunConfig, fleet: Fleet, directory: RunDirectory, progress: ProgressDisplay) -> "RunContext":
        """The context of a fleet, whose store this process speaks to from now on."""
        return cls(config, fleet.flow, fleet, StoreClient(fleet.store), directory, progress)
