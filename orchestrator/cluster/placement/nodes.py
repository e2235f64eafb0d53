"""The nodes of the Ray cluster that this process is connected to, as plain data.

cluster_nodes()  living nodes and all that they have     free_nodes()  the same nodes and what is not reserved
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray's public call has the whole cluster's sum only

NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node, which holds a reservation to it."""


@dataclass(frozen=True)
class Node:
    """A Ray node. A machine has one, except in tests."""

    id: str
    """Ray's id."""
    name: str
    """Name of the node's host."""
    address: str
    cpus: float = 0.0
    """Number of logical CPUs, as Ray counts them."""
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Labels of `ray start --labels`, and those that Ray gives by itself."""
    memory: float = 0.0
    """Bytes of memory that may be reserved in all."""

    def is_called(self, name: str) -> bool:
        """Return whether a name means this node. `name`: as a user would write it."""
        return name in (self.name, self.address, self.id)

    def has(self, labels: Mapping[str, str]) -> bool:
        return all(self.labels.get(key) == value for key, value in labels.items())


def titles(nodes: Sequence[Node]) -> dict[str, str]:
    """The name that people read of each node, by its id: the host's name, with the address or the id where several
    nodes have the same."""
    result = {}
    for node in nodes:
        same = [other for other in nodes if other.name == node.name]
        if len(same) == 1:
            result[node.id] = node.name
        elif len({other.address for other in same}) == len(same):
            result[node.id] = f"{node.name} ({node.address})"
        else:
            result[node.id] = f"{node.name} ({node.id[:8]})"
    return result


def this_node() -> str:
    """Ray's id of the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def cluster_nodes() -> list[Node]:
    """Living nodes, the driver's first, then by address."""
    entries: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return in_order([node_of(entry) for entry in entries if entry["Alive"]], this_node())


def in_order(nodes: Iterable[Node], driver: str) -> list[Node]:
    """Sort nodes: the driver's first, then by address."""
    return sorted(nodes, key=lambda node: (node.id != driver, _sortable(node.address), node.id))


def node_of(entry: Mapping[str, Any]) -> Node:
    """The node of an entry of `ray.nodes()`."""
    resources = entry["Resources"]
    return Node(
        entry["NodeID"], entry["NodeManagerHostname"], entry["NodeManagerAddress"],
        resources.get("CPU", 0.0), resources.get("GPU", 0.0), dict(entry.get("Labels") or {}),
        resources.get("memory", 0.0),
    )  # fmt: skip


def free_nodes() -> list[Node]:
    """Living nodes with those of their CPUs and GPUs that are not reserved."""
    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    left = [(node, free.get(node.id, {})) for node in cluster_nodes()]
    return [replace(node, cpus=has.get("CPU", 0.0), gpus=has.get("GPU", 0.0)) for node, has in left]


def _sortable(address: str) -> tuple[tuple[int, str], ...]:
    """The sort key of an address: 10.0.0.9 comes before 10.0.0.10."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in address.split("."))
