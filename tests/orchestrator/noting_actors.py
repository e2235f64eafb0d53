"""Actors that note what they are asked, in the order of all: what the controller's parts say to whom, and when."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.workers.protocols import Publication
from tests.fakes.actors import Call, FakeHandle
from tests.orchestrator.one_node import on_one_node


class NotingActors:
    """Actors in place of a fleet's. `numbers`: how many each role has. `answers`: what an actor's methods return, by
    its name."""

    def __init__(
        self,
        numbers: Mapping[str, int],
        weights_root: Path = Path(),
        answers: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.killed: list[str] = []
        self.removed: list[str] = []
        self._answers = answers or {}
        self.weights_root, self.owner = weights_root, Owner()
        self.relay_nodes = on_one_node(self.handle("agent"))
        self._numbers = numbers
        self.plan: list[ActorPlan] = []
        """Actors that are not there, but are to be."""

    @property
    def said(self) -> list[str]:
        """`rollout-0 sleep`, ..."""
        return [f"{call.name} {call.method}" for call in self.calls]

    def handle(self, name: str) -> FakeHandle:
        published = {"finish_publishing": lambda version, epoch: Publication("v", version)}
        answers = published | {**self._answers.get(name, {})}
        return FakeHandle(None, name, self.calls, **answers)

    def role(self, role: str) -> list[tuple[str, FakeHandle]]:
        names = [f"{role}-{index}" for index in range(self._numbers[role])]
        return [(name, self.handle(name)) for name in names]

    def kill(self, names: Iterable[str]) -> None:
        self.killed += names

    def remove(self, names: Iterable[str]) -> None:
        self.removed += names
