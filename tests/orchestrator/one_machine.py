"""What a fleet says of its members, and of files where every rank sees the driver's disk; and a snapshot of a store
that is empty. For fleets of tests."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from penstock.conf.cluster import ClusterConfig
from penstock.orchestrator.cluster.fleet.fleet import RollCall
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.store.service.snapshot import FORMAT, MANIFEST, PREFIX

ROLES = ("prompts", "rollout", "reward", "compute", "scorer", "trainer")


class OneMachine:
    """What a `Fleet` answers. `role`: its own. Nobody takes the place of another."""

    def __init__(self, role: Callable[[str], Any]) -> None:
        self._role = role
        self.roll_call = RollCall(dict, NodeAgents("run", "run", ClusterConfig()), lambda name: None)

    def teams(self, *roles: str) -> list[list[str]]:
        return [[name] for role in roles for name, _ in self._role(role)]

    async def present(self, role: str, stage: str | None = None) -> list[tuple[str, Any]]:
        return list(self._role(role))

    def kill(self, names: Collection[str]) -> None:
        pass

    remove = kill

    @property
    def actors(self) -> dict[str, Any]:
        return {name: handle for role in ROLES for name, handle in self._role(role)}

    def handle_of(self, name: str) -> Any:
        return self.actors.get(name)

    def is_lent(self, name: str) -> bool:
        return False

    def num_loans(self, name: str) -> int:
        return 0

    def provided(self, directory: str, members: Collection[tuple[str, Any]]) -> dict[str, str]:
        return {name: directory for name, _ in members}

    async def places(self, directory: str) -> dict[str, str]:
        return {name: directory for name, _ in self._role("trainer")}

    async def collect(self, directory: str, places: dict[str, str]) -> None:
        assert set(places.values()) == {directory}

    async def discard(self, directory: str, places: dict[str, str]) -> None:
        await self.collect(directory, places)


def empty_snapshot(root: str, number: int) -> str:
    directory = Path(root) / f"{PREFIX}{number}"
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": {}}))
    return str(directory)
