"""Reserves all that a run's actors need, on the nodes that `assignment.py` gives them: all of it or nothing.

    bundle 0: node A, 1 CPU          Rollout-0
    bundle 1: node B, 1 CPU, 1 GPU   Trainer-policy-0 (0.5), Rollout-1 (0.5): placement=colocated
    …                                actors that reserve nothing are held to their node without one

The reservation is one placement group of Ray's, each bundle pinned to its node by a label. Two runs that start on one
cluster at the same time cannot hold a half each and wait for the other: the second waits for what it planned, takes
other nodes when they are free, and is told in the end which runs have what it wants.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.owners import Owner, ThisProcess
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_sharing, run_of
from penstock.orchestrator.cluster.placement.assignment import Assignment, assign, open_nodes, place_one
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node, cluster_nodes, free_nodes, titles

PATIENCE_S = 5.0
"""Seconds that a run waits for the nodes that it planned, before it looks whether others are free."""
OF_MEMBER = "/"
"""Separator between the namespace and the name of a member that has a reservation of its own."""
_LOG = logging.getLogger("penstock")


@dataclass(frozen=True)
class Claim:
    """Room for one more actor. `group` and `bundle`: what is reserved for it; None where it reserves nothing. `is_own`:
    the group has nothing else."""

    node: Node
    group: PlacementGroup | None = None
    bundle: int = 0
    is_own: bool = False

    def release(self) -> None:
        """Give the room back to the cluster, where it is a reservation of its own."""
        if self.group is not None and self.is_own:
            remove_placement_group(self.group)


class Reservation:
    """Lifecycle: `make` before the actors are created, `options` for each of them, `release` at the end. Meanwhile
    others may join: `claim`, then `accept`; and members that leave are `vacate`d.

    The room of a member of the start stays the run's, for the next that joins in its role. The room of a member that
    joined is its own, and goes back to the cluster with it.
    """

    def __init__(
        self, assignment: Assignment, index: Mapping[str, int], group: PlacementGroup | None, owner: Owner
    ) -> None:
        self.assignment = assignment
        self._owner = owner
        self._group = group
        self._claims = {name: Claim(assignment.node_of[name], group, bundle) for name, bundle in index.items()}
        """Claims of the actors that have reserved something, by name."""
        self._vacant: list[tuple[ActorPlan, Claim]] = []
        """Free claims of the start, each with the actor that had it."""

    @classmethod
    def make(
        cls, actors: Sequence[ActorPlan], config: RunConfig, name: str, timeout_s: float, owner: Owner | None = None
    ) -> "Reservation":
        """Reserve. `name`: the namespace of the run. `owner`: the process that it ends with; None: this one. Raises
        `ResourceError` if the cluster can never hold it, and if what it wants is not free in time."""
        owner = owner or ThisProcess()
        bundles = bundles_of(actors, config)
        index = {actor.name: number for number, unit in enumerate(bundles) for actor in unit}
        deadline = time.monotonic() + timeout_s
        plans = _plans(actors, config)
        assignment = next(plans)
        if not bundles:
            return cls(assignment, {}, None, owner)
        told = False
        while (left_s := deadline - time.monotonic()) > 0:
            if group := _reserved(bundles, assignment, name, min(PATIENCE_S, left_s), owner):
                return cls(assignment, index, group, owner)
            if not told:
                _LOG.warning("%s: waiting up to %g s. %s", wanted(bundles, assignment), timeout_s, holders())
            told, assignment = True, next(plans)
        raise ResourceError(
            f"What the run reserves was not free within {timeout_s:g} s (rollout.start_timeout_s): "
            f"{wanted(bundles, assignment)}. {holders()} End what is not needed, wait for it, or ask for less; "
            "`ray status` shows the whole cluster."
        )

    def options(self, actor: ActorPlan) -> dict[str, Any]:
        """Ray's options for the place of an actor."""
        claim = self._claims.get(actor.name)
        if claim is not None and claim.group is not None:
            return {"scheduling_strategy": PlacementGroupSchedulingStrategy(claim.group, claim.bundle)}
        node = self.assignment.node_of[actor.name]
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}

    def claim(self, actor: ActorPlan, actors: Sequence[ActorPlan], config: RunConfig, name: str) -> Claim:
        """Claim room for one more actor, now. `actors`: those of the run; `name`: its namespace. Blocks for seconds.
        Raises `ResourceError` if there is none."""
        living = {node.id for node in cluster_nodes()}
        for number, (like, claim) in enumerate(self._vacant):
            is_alike = (like.role, like.num_cpus, like.num_gpus) == (actor.role, actor.num_cpus, actor.num_gpus)
            if is_alike and claim.node.id in living:
                del self._vacant[number]
                return claim
        roles_on: dict[str, list[str]] = defaultdict(list)
        for other in actors:
            if other.name in self.assignment.node_of:
                roles_on[self.assignment.node_of[other.name].id].append(other.role)
        node = place_one(actor, open_nodes(actor.role, free_nodes(), config.cluster), roles_on)
        if node is not None and not _resources([actor]):
            return Claim(node)
        if node is not None:
            alone = Assignment((node,), {actor.name: node})
            if group := _reserved([[actor]], alone, f"{name}{OF_MEMBER}{actor.name}", PATIENCE_S, self._owner):
                return Claim(node, group, is_own=True)
        raise ResourceError(
            f"No node that {actor.role} may be on has room for one more, which reserves "
            f"{_amount(_resources([actor]))}. {holders()} Add a node, or end what is not needed."
        )

    def claim_again(self, actor: ActorPlan, actors: Sequence[ActorPlan], config: RunConfig, name: str) -> Claim:
        """Claim room for an actor whose node has left: it may get the room that it had, if only its agent was lost. It
        keeps what it has until the claim is accepted. Raises `ResourceError`."""
        own = self._claims.get(actor.name)
        if own is None or own.group is None or own.is_own:
            return self.claim(actor, actors, config, name)
        self._vacant.append((actor, own))
        try:
            return self.claim(actor, actors, config, name)
        except BaseException:
            self._vacant.remove((actor, own))
            raise

    def accept(self, actor: ActorPlan, claim: Claim) -> None:
        """Take a claim as the room of an actor that has joined or moved, or is about to."""
        before, self._claims[actor.name] = self._claims.get(actor.name), claim
        if before is not None:
            before.release()
        self.assignment = self.assignment.with_one(actor.name, claim.node)

    def vacate(self, actor: ActorPlan) -> None:
        """Give back the room of an actor that has left."""
        self.assignment = self.assignment.without(actor.name)
        if (claim := self._claims.pop(actor.name, None)) is None:
            return
        claim.release()
        if claim.group is not None and not claim.is_own:
            self._vacant.append((actor, claim))

    @property
    def groups(self) -> list[PlacementGroup]:
        """All placement groups of the run."""
        claims = [*self._claims.values(), *(claim for _, claim in self._vacant)]
        return [*filter(None, {self._group, *(claim.group for claim in claims)})]

    def __getstate__(self) -> dict[str, Any]:
        """The state for the next process that drives the run: all but this one's owner."""
        return {key: value for key, value in self.__dict__.items() if key != "_owner"}

    def belong_to(self, owner: Owner) -> "Reservation":
        """Set the owner in the process that has taken the reservation over."""
        self._owner = owner
        return self

    def release(self) -> None:
        for claim in self._claims.values():
            claim.release()
        self._claims.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def bundles_of(actors: Sequence[ActorPlan], config: RunConfig) -> list[list[ActorPlan]]:
    """Actors that reserve something, one list a bundle: those that share a GPU together, others alone."""
    shared = plan_sharing(actors, config)
    sharing = {actor.name for unit in shared for actor in unit}
    return shared + [[actor] for actor in actors if actor.name not in sharing and (actor.num_cpus or actor.num_gpus)]


def wanted(bundles: Sequence[Sequence[ActorPlan]], assignment: Assignment) -> str:
    """The reservation in words: `2 CPU(s) on node-1, 1 CPU(s) and 1 GPU(s) on node-2`."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for unit in bundles:
        for kind, amount in _resources(unit).items():
            sums[assignment.node_of[unit[0].name].id][kind] += amount
    names = titles(assignment.nodes)
    return ", ".join(f"{_amount(sums[node.id])} on {names[node.id]}" for node in assignment.nodes if node.id in sums)


def holders() -> str:
    """Reservations on the cluster, a sentence for each holder, runs by their names."""
    nodes, free = cluster_nodes(), {node.id: node for node in free_nodes()}
    names, used = titles(nodes), {}
    of_owner: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
    for node in nodes:
        left = free.get(node.id, node)
        used[node.id] = {"CPU": node.cpus - left.cpus, "GPU": node.gpus - left.gpus}
    for group in _groups():
        for number, node_id in group["bundles_to_node_id"].items():
            for kind in ("CPU", "GPU"):
                amount = group["bundles"][number].get(kind, 0.0)
                of_owner[_owner(group["name"])][node_id][kind] += amount
                if node_id in used:
                    used[node_id][kind] -= amount
    sentences = [f"{owner} has {_places(own, names)}." for owner, own in of_owner.items()]
    others = {node_id: amounts for node_id, amounts in used.items() if any(a > 1e-3 for a in amounts.values())}
    if others:
        sentences.append(f"Other jobs have {_places(others, names)}.")
    return " ".join(sentences)


def _plans(actors: Sequence[ActorPlan], config: RunConfig) -> Iterator[Assignment]:
    """Assignments to try, without end: one for the whole cluster, then one for what is free if that holds the run.
    Raises `ResourceError` if the cluster could not hold the run even if it were empty."""
    while True:
        yield assign(actors, cluster_nodes(), config)
        with contextlib.suppress(ResourceError):
            yield assign(actors, free_nodes(), config)


def _reserved(
    bundles: Sequence[Sequence[ActorPlan]], assignment: Assignment, name: str, timeout_s: float, owner: Owner
) -> PlacementGroup | None:
    """Reserve bundles as one placement group; None if they are not free in time."""
    labels = [{NODE_ID: assignment.node_of[unit[0].name].id} for unit in bundles]
    group = owner.reserve([_resources(unit) for unit in bundles], labels, name)
    try:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if group.wait(1):  # a short one: an interrupt is heard in between
                return group
    except BaseException:
        remove_placement_group(group)
        raise
    remove_placement_group(group)
    return None


def _groups() -> list[dict[str, Any]]:
    """Placement groups that hold something now."""
    return [group for group in placement_group_table().values() if group["state"] == "CREATED"]


def _owner(name: str) -> str:
    """The holder of a reservation in words, by its name.

    >>> _owner("penstock-sums-0123abcd-89abcdef/Rollout-3"), _owner("serve")
    ('Run sums (0123abcd)', "Placement group 'serve'")
    """
    run = run_of(name.partition(OF_MEMBER)[0])
    return f"Run {run[0]} ({run[1]})" if run is not None else f"Placement group {name!r}"


def _places(amounts: Mapping[str, Mapping[str, float]], names: Mapping[str, str]) -> str:
    return ", ".join(f"{_amount(own)} on {names.get(node_id, node_id[:8])}" for node_id, own in amounts.items())


def _resources(unit: Sequence[ActorPlan]) -> dict[str, float]:
    """Resources of a unit as Ray takes them: without zeros."""
    sums = {"CPU": sum(actor.num_cpus for actor in unit), "GPU": sum(actor.num_gpus for actor in unit)}
    return {kind: round(amount, 4) for kind, amount in sums.items() if amount}


def _amount(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources[kind]:g} {kind}(s)" for kind in ("GPU", "CPU") if resources.get(kind, 0.0) > 1e-3)
