"""The placement of actors on the nodes of the present cluster, as `penstock validate` prints it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.cluster import look
from penstock.orchestrator.cluster.placement.actors import ActorPlan, needed
from penstock.orchestrator.cluster.placement.assignment import Assignment, assign
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node, titles


@dataclass(frozen=True)
class PlacementView:
    plan: Sequence[ActorPlan]
    nodes: Sequence[Node] = ()
    """Nodes of the cluster, the driver's first. Empty without a cluster, and if it does not answer."""
    assignment: Assignment | None = None
    refused: ResourceError | None = None
    """The reason why there is no assignment."""
    wait_s: float = 0.0
    """Seconds that the run waits for nodes."""

    @classmethod
    def of(cls, plan: Sequence[ActorPlan], config: RunConfig) -> "PlacementView":
        nodes: Sequence[Node] = ()
        try:
            nodes = look() or ()
            return cls(plan, nodes, assign(plan, nodes, config) if nodes else None)
        except ResourceError as error:
            return cls(plan, nodes, refused=error, wait_s=config.cluster.wait_s)

    @property
    def is_of_cluster(self) -> bool:
        """True if there is a cluster; else the run starts a local Ray."""
        return bool(self.nodes or self.refused)

    def found(self) -> str:
        """Describe the placement in a few words. Raises `ResourceError` for what cannot be placed."""
        if self.nodes and self.refused and self.wait_s:
            return f"the run waits for nodes for up to {self.wait_s:g} s (cluster.wait_s): {self.refused}"
        if self.assignment is None:
            raise self.refused or ResourceError("There is no cluster.")
        cpus, gpus = needed(self.plan)
        there = f"{len(self.assignment.nodes)} of the cluster's {len(self.nodes)} node(s)"
        return f"{len(self.plan)} actors on {there} reserve {cpus:g} logical CPU(s) and {gpus:g} GPU(s)"

    def actors(self) -> Table:
        """A table of the actors: what each reserves, and its node."""
        table = _table("actor", "stage", "CPUs", "GPUs", *(["node"] if self.assignment else []))
        names = titles(self.nodes)
        for actor in self.plan:
            node = [names[self.assignment.node_of[actor.name].id]] if self.assignment else []
            table.add_row(actor.name, actor.stage or "", f"{actor.num_cpus:g}", f"{actor.num_gpus:g}", *node)
        cpus, gpus = needed(self.plan)
        table.add_row("in all", "", f"{cpus:g}", f"{gpus:g}", style="bold")
        return table

    def reserved(self) -> Table:
        """A table of the cluster's nodes, and how much of each the run reserves."""
        table = _table("node", "address", "CPUs", "GPUs", "labels", "")
        names = titles(self.nodes)
        for index, node in enumerate(self.nodes):
            cpus, gpus = f"{node.cpus:g}", f"{node.gpus:g}"
            if self.assignment is not None:
                there = set(self.assignment.names_on(node))
                own = needed([actor for actor in self.plan if actor.name in there])
                cpus, gpus = f"{own[0]:g} of {cpus}", f"{own[1]:g} of {gpus}"
            labels = ", ".join(f"{key}={value}" for key, value in sorted(node.labels.items()) if key != NODE_ID)
            table.add_row(names[node.id], node.address, cpus, gpus, labels, "" if index else "the driver's")
        return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column.endswith("PUs") else "left")
    return table
