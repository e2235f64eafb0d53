"""The facts that a process needs to go on with a fleet that another one has started: plain data, no handles. They are
kept where the process finds them that drives the run after this one (`takeover/`).
"""

from collections import Counter
from dataclasses import dataclass

from penstock.orchestrator.cluster.fleet.store_process import StoreState
from penstock.orchestrator.cluster.nodes.agents import AgentsState
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.reservation import Reservation


@dataclass(frozen=True)
class FleetState:
    """The fleet at one moment. Members that start or join at that moment are not in it."""

    plan: list[ActorPlan]
    names: dict[str, str]
    """Names in Ray of the members that are there, by the plan's name."""
    made: Counter[str]
    """Number of actors made so far, by the plan's name."""
    reservation: Reservation
    agents: AgentsState
    places: dict[tuple[str, str], str]
    """Places of the driver's files on other nodes, by node and the driver's path."""
    store: StoreState | None
    cores: dict[str, int]
    """Number of cores, by node."""

    @property
    def all_names(self) -> list[str]:
        """Names of all actors in Ray."""
        stores = [self.store.name] if self.store is not None else []
        return [*self.names.values(), *self.agents.members.values(), *stores]
