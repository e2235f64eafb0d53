"""Actors that note what they are asked, in the order of all: what the controller's parts say to whom, and when."""

from collections.abc import Mapping
from pathlib import Path

from penstock.orchestrator.cluster.owners import ThisProcess
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.workers.protocols import Publication
from tests.fakes.actors import Call, FakeHandle
from tests.orchestrator.one_node import on_one_node


class NotingActors:
    """Actors in place of a fleet's. `numbers`: how many each role has."""

    def __init__(self, numbers: Mapping[str, int], weights_root: Path = Path()) -> None:
        self.calls: list[Call] = []
        self.weights_root, self.owner = weights_root, ThisProcess()
        self.relay_nodes = on_one_node(self.handle("agent"))
        self._numbers = numbers
        self.plan: list[ActorPlan] = []
        """Actors that are not there, but are to be."""

    @property
    def said(self) -> list[str]:
        """`rollout-0 sleep`, ..."""
        return [f"{call.name} {call.method}" for call in self.calls]

    def handle(self, name: str) -> FakeHandle:
        return FakeHandle(None, name, self.calls, publish=lambda root, version, epoch: Publication("v", version))

    def role(self, role: str) -> list[tuple[str, FakeHandle]]:
        names = [f"{role}-{index}" for index in range(self._numbers[role])]
        return [(name, self.handle(name)) for name in names]
