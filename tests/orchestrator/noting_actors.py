"""Actors that note what they are asked, in the order of all: what the controller's parts say to whom, and when."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.orchestrator.cluster.owners import ThisProcess
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.workers.protocols import Publication
from tests.orchestrator.one_node import on_one_node


class NotingActors:
    """In place of a fleet. `numbers`: of each role's actors. `said`: `rollout-0 sleep`, ..."""

    def __init__(self, numbers: Mapping[str, int], weights_root: Path = Path()) -> None:
        self.said: list[str] = []
        self.weights_root, self.owner = weights_root, ThisProcess()
        self.relay_nodes = on_one_node(self.handle("agent"))
        self._numbers = numbers
        self.plan: list[ActorPlan] = []
        """Actors that are not there, but are to be."""

    def handle(self, name: str) -> Any:
        return _Handle(name, self.said)

    def role(self, role: str) -> list[tuple[str, Any]]:
        names = [f"{role}-{index}" for index in range(self._numbers[role])]
        return [(name, self.handle(name)) for name in names]


class _Handle:
    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said
        self._held: set[str] = set()

    def holds(self, method: str) -> None:
        """It answers this no more."""
        self._held.add(method)

    def __getattr__(self, method: str) -> Any:
        name, said, held = self._name, self._said, self._held

        class Method:
            @staticmethod
            async def remote(*arguments: Any) -> Any:
                said.append(f"{name} {method}")
                if method in held:
                    await asyncio.Event().wait()
                return Publication("v", arguments[1]) if method == "publish" else None

        return Method
