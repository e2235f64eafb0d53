"""Reserves all that a run's actors need, on the nodes that `assignment.py` gives them: all of it or nothing.

    bundle 0: node A, 1 CPU          Rollout-0
    bundle 1: node B, 1 CPU, 1 GPU   Trainer-policy-0 (0.5), Rollout-1 (0.5): placement=colocated
    …                                actors that reserve nothing are held to their node without one

The reservation is one placement group of Ray's, each bundle pinned to its node by a label. Two runs that start on one
cluster at the same time cannot hold a half each and wait for each other: the second stands in a queue, first come,
first served, and takes whatever nodes are free when it is first. If that takes too long, an error names the runs that
hold what it wants.

    no room ─▶ a place in the queue, and a request ─▶ … ─▶ first, and there is room ─▶ the reservation

The request is a placement group whose bundles may be on any node, so `ray status` shows it and the cluster's autoscaler
brings nodes for it. Ray fills the requests of several runs in any order. A run that gets what it asked for before its
turn takes the request back, and asks again when it is first. The place is a placement group of one byte, whose name has
the time at which the run came. Both end with their process, however it ends.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.owners import Owner, reserved
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_sharing, run_of
from penstock.orchestrator.cluster.placement.assignment import Assignment, assign, chosen_nodes, open_nodes, place_one
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node, cluster_nodes, free_nodes, titles

PLACE = "/waits-"
"""Text between the namespace of a run that waits and the time at which it came."""
REQUEST = "/request"
"""End of a request's name."""
ONE_BYTE = {"memory": 1.0}
"""Resources of a place: every node has them."""


class Queue:
    """The place of a run in the queue, with its request. Lifecycle: `wait` while other runs are `ahead` or there is no
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


PATIENCE_S = 5.0
"""Seconds for Ray to reserve what was free a moment ago."""
LOOK_S = 1.0
"""Seconds between two looks of a run that waits for room."""
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
    members may join: `claim`, then `accept`; those that leave are `vacate`d.

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
        """Free claims, each with an actor that had it, or that it was asked for."""
        self._asked: list[PlacementGroup] = []
        """Requests for room for one more actor each, which no node has yet."""

    @classmethod
    def make(
        cls, actors: Sequence[ActorPlan], config: RunConfig, name: str, timeout_s: float, owner: Owner | None = None
    ) -> "Reservation":
        """Reserve. `name`: the namespace of the run. `owner`: the process that it ends with; None: this one. Raises
        `ResourceError` if the cluster can never hold it, and if what it wants is not free in time."""
        owner = owner or Owner()
        bundles = bundles_of(actors, config)
        index = {actor.name: number for number, unit in enumerate(bundles) for actor in unit}
        nodes, deadline, told, tries = cluster_nodes(), time.monotonic() + timeout_s, "", 0
        assignment = None if bundles and config.cluster.wait_s else assign(actors, nodes, config)
        if assignment is not None and not bundles:
            return cls(assignment, {}, None, owner)
        labels = [labels_of(unit, nodes, config.cluster) for unit in bundles]
        limit = f"{timeout_s:g} s ({'cluster.wait_s' if config.cluster.wait_s else 'rollout.start_timeout_s'})"
        with contextlib.closing(Queue(name, [_resources(unit) for unit in bundles], labels)) as queue:
            while (left_s := deadline - time.monotonic()) > 0:
                before, own = queue.ahead(), queue.share()
                may_try = not before and (own or not queue.is_waiting)  # Ray knows of more than CPUs and GPUs
                room = _room(actors, config, own, beside=tries % 2 == 0) if may_try else None
                tries += bool(own)
                if room is not None:
                    queue.take_back()
                    if group := _reserved(bundles, room, name, min(PATIENCE_S, left_s), owner):
                        return cls(room, index, group, owner)
                queue.wait(is_first=not before)
                told = _report_waiting(f"waiting up to {limit} for {wanted(bundles)}{_behind(before)}.", told, name)
                time.sleep(min(LOOK_S, left_s))
        raise ResourceError(
            f"What the run reserves was not free within {limit}: {wanted(bundles)}{_behind(before)}. "
            f"{_lacking(actors, config)}{holders()} End what is not needed, wait for it, or ask for less; `ray status` "
            "shows the whole cluster."
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

    def ask_for(self, count: int, actor: ActorPlan, config: RunConfig, name: str) -> None:
        """Ask the cluster, and so its autoscaler, for room for so many more actors like one; 0: take back what no node
        has yet. `name`: the namespace of the run."""
        for group in self._asked[count:]:
            remove_placement_group(group)
        del self._asked[count:]
        while len(self._asked) < count:
            self._asked.append(self.request(actor, config, name))

    def request(self, actor: ActorPlan, config: RunConfig, name: str) -> PlacementGroup:
        """Ask the cluster for room for one more actor like one, on whichever node it may be. `name`: the namespace of
        the run."""
        labels, number = labels_of([actor], cluster_nodes(), config.cluster), time.time_ns()
        bundle = _resources([actor]) or ONE_BYTE
        return self._owner.reserve([bundle], [labels], f"{name}{OF_MEMBER}{actor.role}-{number}")

    def num_received(self, actor: ActorPlan) -> int:
        """Number of actors like one for which there is room now that was asked for."""
        for group in list(self._asked):
            if (claim := received(group)) is not None:
                self._asked.remove(group)
                self._vacant.append((actor, claim))
        return sum(claim.is_own and like.role == actor.role for like, claim in self._vacant)

    @property
    def is_asking(self) -> bool:
        return bool(self._asked)

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
        return [*filter(None, {self._group, *self._asked, *(claim.group for claim in claims)})]

    def __getstate__(self) -> dict[str, Any]:
        """The state for the next process that drives the run: all but this one's owner."""
        return {key: value for key, value in self.__dict__.items() if key != "_owner"}

    def belong_to(self, owner: Owner) -> "Reservation":
        """Set the owner in the process that has taken the reservation over."""
        self._owner = owner
        return self

    def release(self) -> None:
        for claim in (*self._claims.values(), *(claim for _, claim in self._vacant)):
            claim.release()
        for group in self._asked:
            remove_placement_group(group)
        self._claims.clear()
        self._vacant.clear()
        self._asked.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def received(request: PlacementGroup) -> Claim | None:
    """The claim of a request for one actor; None: no node has room for it yet."""
    nodes = {node.id: node for node in cluster_nodes()}
    there = bundles_by_node(placement_group_table(request)).keys() & nodes.keys()
    return next((Claim(nodes[node_id], request, is_own=True) for node_id in there), None)


def withdraw(request: PlacementGroup) -> None:
    """Take a request back that no node has room for, or that is not needed any more."""
    remove_placement_group(request)


def bundles_of(actors: Sequence[ActorPlan], config: RunConfig) -> list[list[ActorPlan]]:
    """Actors that reserve something, one list a bundle: those that share a GPU together, all others alone."""
    shared = plan_sharing(actors, config)
    sharing = {actor.name for unit in shared for actor in unit}
    return shared + [[actor] for actor in actors if actor.name not in sharing and (actor.num_cpus or actor.num_gpus)]


def wanted(bundles: Sequence[Sequence[ActorPlan]]) -> str:
    """The reservation in words: `2 GPU(s) and 5 CPU(s)`."""
    return _amount(_resources([actor for unit in bundles for actor in unit]))


def holders(beside: str = "") -> str:
    """Reservations on the cluster, a sentence for each holder, runs by their names. `beside`: the namespace of a run
    that is left out."""
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
    of_owner.pop(_owner(beside), None)
    sentences = [f"{owner} has {text}." for owner, own in of_owner.items() if (text := _places(own, names))]
    others = {node_id: amounts for node_id, amounts in used.items() if any(a > 1e-3 for a in amounts.values())}
    if others:
        sentences.append(f"Other jobs have {_places(others, names)}.")
    return " ".join(sentences)


def _room(
    actors: Sequence[ActorPlan], config: RunConfig, own: Mapping[str, Sequence[Mapping[str, float]]], *, beside: bool
) -> Assignment | None:
    """An assignment to what the run's request holds; None: there is none. `own`: its bundles, by node. `beside`: nodes
    with what is free as well."""
    nodes = []
    for node in free_nodes():
        bundles, share = own.get(node.id, ()), float(beside)
        cpus, gpus = (sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU"))
        nodes.append(replace(node, cpus=share * node.cpus + cpus, gpus=share * node.gpus + gpus))
    with contextlib.suppress(ResourceError):
        return assign(actors, nodes, config)
    return None


def _lacking(actors: Sequence[ActorPlan], config: RunConfig) -> str:
    """The sentences about what the cluster would lack even if it were empty; empty: nothing."""
    try:
        assign(actors, cluster_nodes(), config)
    except ResourceError as error:
        return f"No node came that has room for it. {error} "
    return ""


def _behind(runs: Sequence[str]) -> str:
    return f", behind {', '.join(map(_owner, runs))}" if runs else ""


def _report_waiting(text: str, told: str, name: str) -> str:
    """Tell people what the run waits for, if that is new to them. Returns what they know now. `name`: the run's
    namespace."""
    if text != told:
        _LOG.warning(" ".join([text, *filter(None, [holders(name)]), "`ray status` shows what was asked for."]))
    return text


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
    texts = {node_id: _amount(own) for node_id, own in amounts.items()}
    return ", ".join(f"{text} on {names.get(node_id, node_id[:8])}" for node_id, text in texts.items() if text)


def _resources(unit: Sequence[ActorPlan]) -> dict[str, float]:
    """Resources of a unit as Ray takes them: without zeros."""
    sums = {"CPU": sum(actor.num_cpus for actor in unit), "GPU": sum(actor.num_gpus for actor in unit)}
    sums["memory"] = sum(actor.memory for actor in unit)
    return {kind: round(amount, 4) for kind, amount in sums.items() if amount}


def _amount(resources: Mapping[str, float]) -> str:
    texts = [f"{resources[kind]:g} {kind}(s)" for kind in ("GPU", "CPU") if resources.get(kind, 0.0) > 1e-3]
    memory = resources.get("memory", 0.0) / 2**30
    return " and ".join([*texts, *([f"{memory:.1f} GiB of memory"] if memory >= 0.05 else [])])
