"""The queue of the runs that wait for room on a cluster: first come, first served.

    no room ─▶ a place in the queue, and a request ─▶ … ─▶ first, and there is room ─▶ the reservation

The request is a placement group whose bundles may be on any node, so `ray status` shows it and the cluster's autoscaler
brings nodes for it. Ray fills the requests of several runs in any order. A run that gets what it asked for before its
turn takes the request back, and asks again when it is first. The place is a placement group of one byte, whose name has
the time at which the run came. Both end with their process, however it ends.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from penstock.conf.cluster import ClusterConfig
from penstock.orchestrator.cluster.owner_actor import reserved
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node
from penstock.orchestrator.cluster.placement.refusals import chosen_nodes

PLACE = "/waits-"
"""Text between the namespace of a run that waits and the time at which it came."""
REQUEST = "/request"
"""End of a request's name."""
ONE_BYTE = {"memory": 1.0}
"""Resources of a place: every node has them."""


class Queue:
    """The place of a run in the queue, with its request. Lifecycle: `wait` while others are `ahead` or there is no
    room, `close`."""

    def __init__(self, namespace: str, bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
        """`labels`: those of the nodes that each bundle may be on."""
        self._name, self._bundles, self._labels = namespace, bundles, labels
        self._place: PlacementGroup | None = None
        self._request: PlacementGroup | None = None
        self._came = time.time_ns()
        self._has_stepped_back = False

    def ahead(self) -> list[str]:
        """Namespaces of the runs that came before and still wait, in the order in which they came."""
        return runs_ahead(names_of_groups(), self._name, self._came)

    @property
    def is_waiting(self) -> bool:
        return self._place is not None

    def wait(self, is_first: bool) -> None:
        """Take a place, and ask for room; take back what has come before the run's turn."""
        if self._place is None:
            self._place = reserved([ONE_BYTE], [{}], f"{self._name}{PLACE}{self._came}")
        if self.share() and not is_first:
            self.take_back()
            self._has_stepped_back = True
        elif self._request is None and (is_first or not self._has_stepped_back):
            self._request = reserved(self._bundles, self._labels, f"{self._name}{REQUEST}")

    def share(self) -> dict[str, list[Mapping[str, float]]]:
        """Bundles that the request holds, by node; empty as long as not all of them have a node."""
        return bundles_by_node(placement_group_table(self._request)) if self._request is not None else {}

    def take_back(self) -> None:
        """Take the request back, such as to reserve on chosen nodes what it holds."""
        if self._request is not None:
            remove_placement_group(self._request)
            self._request = None

    def close(self) -> None:
        self.take_back()
        if self._place is not None:
            remove_placement_group(self._place)
            self._place = None


def names_of_groups() -> list[str]:
    """Names of the cluster's placement groups."""
    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def runs_ahead(names: Iterable[str], namespace: str, came: int | None = None) -> list[str]:
    """Namespaces of the runs that wait, in the order in which they came, without the given one. `names`: those of
    placement groups. `came`: only runs that came before; None: all.

    >>> runs_ahead(["a/waits-7", "b/waits-5", "b/request", "c/waits-9", "c"], "c", came=9)
    ['b', 'a']
    """
    found = [(int(number), run) for run, is_place, number in (name.partition(PLACE) for name in names) if is_place]
    mine = (came, namespace) if came is not None else None
    return [run for number, run in sorted(found) if run != namespace and (mine is None or (number, run) < mine)]


def bundles_by_node(group: Mapping[str, Any]) -> dict[str, list[Mapping[str, float]]]:
    """Bundles of an entry of Ray's table of placement groups, by node; empty unless all of them have one."""
    found: dict[str, list[Mapping[str, float]]] = {}
    if group.get("state") == "CREATED":
        for number, node_id in group["bundles_to_node_id"].items():
            found.setdefault(node_id, []).append(group["bundles"][number])
    return found


def labels_of(unit: Sequence[ActorPlan], nodes: Sequence[Node], config: ClusterConfig) -> dict[str, str]:
    """Labels of the nodes that a unit may be on, as Ray takes them. Raises `ResourceError` for a name in
    `cluster.nodes` that no node has. `nodes`: those of the cluster."""
    labels = {key: value for actor in unit for key, value in config.labels.get(actor.role, {}).items()}
    if config.nodes:
        labels[NODE_ID] = f"in({','.join(node.id for node in chosen_nodes(nodes, config))})"
    return labels
