"""Ray's placement groups in this process: nodes come and go, and pending groups get their bundles in any order."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.placement_group import validate_placement_group

from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement import reservation
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node


class FakeGroup:
    def __init__(
        self, ray: "FakeRay", bundles: Sequence[dict[str, float]], labels: Sequence[dict[str, str]], name: str
    ) -> None:
        self.name, self.bundles, self.labels = name, bundles, labels
        self.state, self.nodes = "PENDING", list[str]()
        self._ray = ray

    def wait(self, seconds: float) -> bool:
        self._ray.fill()
        if self.state != "CREATED":
            self._ray.sleep(seconds)
        return self.state == "CREATED"

    def entry(self) -> dict[str, Any]:
        return {
            "name": self.name, "state": self.state, "bundles": dict(enumerate(self.bundles)),
            "bundles_to_node_id": dict(enumerate(self.nodes)),
        }  # fmt: skip


class FakeRay:
    """Lifecycle: made, `installed` for a test. `at` says what happens after so many seconds of the clock of this
    class."""

    def __init__(self, nodes: Sequence[Node], random: Random) -> None:
        self.nodes, self._random = list(nodes), random
        self.groups: list[FakeGroup] = []
        self._now, self._events = 0.0, list[tuple[float, Callable[[], Any]]]()

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(monotonic=lambda: self._now, sleep=self.sleep, time_ns=self._time_ns)
        monkeypatch.setattr(reservation, "time", clock)
        monkeypatch.setattr(reservation, "remove_placement_group", self.remove)
        monkeypatch.setattr(reservation, "placement_group_table", self.table)
        monkeypatch.setattr(reservation, "reserved", self.reserve)
        monkeypatch.setattr(Owner, "reserve", lambda _, *arguments: self.reserve(*arguments))
        monkeypatch.setattr(reservation, "cluster_nodes", lambda: list(self.nodes))
        monkeypatch.setattr(reservation, "free_nodes", self.free)

    def at(self, second: float, event: Callable[[], Any]) -> None:
        self._events.append((second, event))

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        due = [event for second, event in self._events if second <= self._now]
        self._events = [one for one in self._events if one[0] > self._now]
        for event in due:
            event()
        self.fill()

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> FakeGroup:
        validate_placement_group(bundles, bundle_label_selector=labels)
        self.groups.append(FakeGroup(self, bundles, labels, name))
        return self.groups[-1]

    def remove(self, group: FakeGroup) -> None:
        group.state = "REMOVED"

    def table(self, group: FakeGroup | None = None) -> Mapping[Any, Any]:
        return group.entry() if group is not None else {id(one): one.entry() for one in self.groups}

    def free(self) -> list[Node]:
        """Nodes with the CPUs that no group has."""
        used: dict[str, float] = defaultdict(float)
        for group in self.groups:
            for node, bundle in zip(group.nodes, group.bundles, strict=False):
                used[node] += bundle.get("CPU", 0.0) * (group.state == "CREATED")
        return [replace(node, cpus=node.cpus - used[node.id]) for node in self.nodes]

    def fill(self) -> None:
        pending = [group for group in self.groups if group.state == "PENDING"]
        for group in self._random.sample(pending, len(pending)):
            if (nodes := self._places(group)) is not None:
                group.state, group.nodes = "CREATED", nodes

    def of(self, state: str) -> list[str]:
        """Names of the groups in a state."""
        return [group.name for group in self.groups if group.state == state]

    def _places(self, group: FakeGroup) -> list[str] | None:
        left, places = {node.id: node.cpus for node in self.free()}, []
        for bundle, labels in zip(group.bundles, group.labels, strict=True):
            cpus, own = bundle.get("CPU", 0.0), labels.get(NODE_ID)
            place = next((node for node in left if left[node] >= cpus and own in (None, node)), None)
            if place is None:
                return None
            left[place] -= cpus
            places.append(place)
        return places

    def _time_ns(self) -> int:
        self._now += 1e-6
        return round(self._now * 1e9)
