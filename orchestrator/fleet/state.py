"""What a process needs to know to go on with a fleet that another one has started: plain data, no handles. Made and
taken up by `fleet.py`; kept where a process finds it that drives the run after this one (`takeover/`).
"""

from collections import Counter
from dataclasses import dataclass

from penstock.orchestrator.fleet.store_process import StoreState
from penstock.orchestrator.nodes.agents import AgentsState
from penstock.orchestrator.placement.actors import ActorPlan
from penstock.orchestrator.placement.reservation import Reservation


@dataclass(frozen=True)
class FleetState:
    """Of one moment. Members that start or join at that moment are not in it."""

    plan: list[ActorPlan]
    names: dict[str, str]
    """Of members that are there, by the plan's name: what Ray knows them by."""
    made: Counter[str]
    """Actors so far, by the plan's name."""
    reservation: Reservation
    agents: AgentsState
    places: dict[tuple[str, str], str]
    """Of the driver's files on other nodes."""
    store: StoreState | None
    cores: dict[str, int]
    """By node."""

    @property
    def all_names(self) -> list[str]:
        """Of all actors, as Ray knows them."""
        stores = [self.store.name] if self.store is not None else []
        return [*self.names.values(), *self.agents.members.values(), *stores]
