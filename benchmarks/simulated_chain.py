"""Chains of any number of nodes in virtual time: the decisions of `workers/weights/chain/` without sockets or clocks.

    python -m benchmarks.simulated_chain --json FILE

Nodes have links of a bandwidth and a latency; they die, with a word (a process: its connections end) or without (a
machine), stand still, or damage what they send. `benchmarks.machines` and the tests of the chain use it too.
"""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from penstock.workers.weights.chain.plan import Broadcast, ChunkTimes, Pull, Timeouts, chain, upstreams
from penstock.workers.weights.chain.subscription import Feed

FOREVER_S = 3600.0


@dataclass(frozen=True)
class Link:
    """The link of every node, each way. Bytes a second, seconds."""

    bandwidth: float
    latency_s: float = 0.0001


@dataclass
class Node:
    name: str
    is_dead: bool = False
    stands_still_until: float = 0.0
    sends_free_at: float = 0.0
    receives_free_at: float = 0.0
    pulls: dict[str, Pull] = field(default_factory=dict)
    """Pulls by the node where the chain begins."""
    logs: dict[str, list[int]] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    """Chunks in the order in which they came."""
    subscribers: list["Subscription"] = field(default_factory=list)
    watched: dict[str, float] = field(default_factory=dict)
    """Times at which silence will have lasted too long, as the node looked last."""
    damaged: int = 0
    bytes_sent: int = 0
    finished_s: float | None = None


@dataclass
class Subscription:
    """A request of one node to another. Over when the asking one's turn is another."""

    up: Node
    down: Node
    source: str
    turn: int
    feed: Feed
    idle_since: float | None = None

    @property
    def pull(self) -> Pull:
        return self.down.pulls[self.source]

    @property
    def is_over(self) -> bool:
        return self.down.is_dead or self.up.is_dead or self.pull.turn != self.turn


class SimulatedChain:
    """A chain in virtual time. Lifecycle: make it, arrange `dies`, `stands_still` and the rest, then `run`.

    SimulatedChain(["a"], {"a": 64}, ["b", "c"], 2**24, Link(125e6)).run()
    """

    def __init__(
        self,
        num_chunks: dict[str, int],
        receivers: Sequence[str],
        chunk_bytes: int,
        link: Link,
        timeouts: Timeouts | None = None,
        version: int = 0,
        damages: Callable[[str, str, int], bool] = lambda up, down, chunk: False,
        written_s: Callable[[int], float] = lambda chunk: 0.0,
    ) -> None:
        """Arrange the nodes. `num_chunks`: of each node that has ranks. `damages`: whether a chunk is damaged this
        time. `written_s`: when a chunk is there at its source."""
        self.link, self.chunk_bytes, self._damages = link, chunk_bytes, damages
        self._timeouts = timeouts or Timeouts()
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._unfinished = set(receivers)
        sources = list(num_chunks)
        self.receivers = list(receivers)
        self.nodes = {name: Node(name) for name in [*sources, *receivers]}
        total = sum(num_chunks.values())
        self._spans = [(number * chunk_bytes, (number + 1) * chunk_bytes) for number in range(total)]
        broadcast = Broadcast(1, version, list(receivers), {})
        first = 0
        for source, count in num_chunks.items():
            chunks = range(first, first + count)
            first += count
            self.nodes[source].logs[source] = []
            for chunk in chunks:
                self.at(written_s(chunk), self._arrive_at(self.nodes[source], source, chunk))
            order = chain(broadcast, sources, source)
            for name in order:
                self._add_pull(self.nodes[name], source, chunks, upstreams(order, source, name))

    def dies(self, name: str, at_s: float, silently: bool = False) -> None:
        """Arrange a death. `silently`: its machine; else its process, so that the others' connections end."""

        def die() -> None:
            self.nodes[name].is_dead = True
            self._unfinished.discard(name)
            for one in [] if silently else self.nodes[name].subscribers:
                if one.pull.turn == one.turn:
                    self.at(self.now + self.link.latency_s, self._tell(one, lambda pull: pull.lost(self.now)))

        self.at(at_s, die)

    def stands_still(self, name: str, at_s: float, for_s: float) -> None:
        """Arrange that a node neither sends nor asks nor receives meanwhile."""

        def stop() -> None:
            self.nodes[name].stands_still_until = self.now + for_s

        self.at(at_s, stop)

    def run(self) -> float:
        """Run until all that live have all chunks, or nothing can happen any more. Returns when the last of them had
        them."""
        while self._events and self.now < FOREVER_S and self._unfinished:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return max((node.finished_s or FOREVER_S for node in self.living), default=0.0)

    @property
    def living(self) -> list[Node]:
        return [self.nodes[name] for name in self.receivers if not self.nodes[name].is_dead]

    @property
    def reparented(self) -> int:
        return sum(pull.reparented for node in self.nodes.values() for pull in node.pulls.values())

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(at_s, self.now), next(self._order), happen))

    def _add_pull(self, node: Node, source: str, chunks: Iterable[int], order: list[str]) -> None:
        chunk_times = ChunkTimes(self._timeouts)
        node.logs[source] = []
        node.pulls[source] = Pull(chunks, order, self.chunk_bytes, chunk_times, self._timeouts, 0.0)
        self.at(0.0, lambda: self._ask(node, source))

    def _ask(self, node: Node, source: str) -> None:
        if self._later(node, lambda: self._ask(node, source)):
            return
        pull, turn = node.pulls[source], node.pulls[source].turn
        up = self.nodes[pull.upstream]
        self._watch_until_deadline(node, source)
        self.at(self.now + 2 * self.link.latency_s, lambda: self._answer(up, node, source, turn))

    def _answer(self, up: Node, node: Node, source: str, turn: int) -> None:
        if up.is_dead or self._later(up, lambda: self._answer(up, node, source, turn)):
            return
        pull = node.pulls[source]
        if pull.turn == turn:
            pull.connected(self.now)
            one = Subscription(up, node, source, turn, Feed(up.logs[source], pull.missing, self._spans))
            up.subscribers = [other for other in up.subscribers if not other.is_over]
            up.subscribers.append(one)
            self._send(one)

    def _watch_until_deadline(self, node: Node, source: str) -> None:
        """Watch again where the deadline has come nearer; one that has moved away is found out when it is looked at."""
        pull = node.pulls[source]
        if pull.deadline < node.watched.get(source, FOREVER_S) or node.watched[source] <= self.now:
            node.watched[source] = pull.deadline
            self.at(pull.deadline, lambda: self._watch(node, source))

    def _watch(self, node: Node, source: str) -> None:
        pull = node.pulls[source]
        if pull.is_complete or self._later(node, lambda: self._watch(node, source)):
            return
        if self.now < pull.deadline:
            self._watch_until_deadline(node, source)
            return
        pull.lost(self.now)
        self.at(pull.not_before, lambda: self._ask(node, source))

    def _send(self, one: Subscription) -> None:
        """Send what there is; else wait for more, and say so from time to time."""
        if one.is_over or self._later(one.up, lambda: self._send(one)):
            return
        one.idle_since = None
        parcel = one.feed.next_parcel()
        if parcel:
            self._transmit(one, parcel)
        elif one.feed.is_over:
            self.at(self.now + self.link.latency_s, self._tell(one, lambda pull: pull.ended(self.now)))
        else:
            one.idle_since = self.now
            self.at(self.now + self._timeouts.heartbeat_s, lambda: self._heartbeat(one, one.idle_since))

    def _heartbeat(self, one: Subscription, idle_since: float | None) -> None:
        if one.is_over or idle_since is None or one.idle_since != idle_since:
            return
        if self._later(one.up, lambda: self._heartbeat(one, idle_since)):
            return
        age = 0.0 if one.up.name == one.source else one.up.pulls[one.source].source_age_s(self.now)
        self.at(self.now + self.link.latency_s, self._tell(one, lambda pull: pull.waiting(age, self.now)))
        self.at(self.now + self._timeouts.heartbeat_s, lambda: self._heartbeat(one, idle_since))

    def _transmit(self, one: Subscription, parcel: list[int]) -> None:
        """Transmit a parcel. Both ends' links carry one at a time; the next of this subscription begins when this one
        has left."""
        num_bytes = sum(self._spans[chunk][1] - self._spans[chunk][0] for chunk in parcel)
        seconds = num_bytes / self.link.bandwidth
        begins = max(self.now, one.up.sends_free_at)
        one.up.sends_free_at = begins + seconds
        one.up.bytes_sent += num_bytes
        received = max(begins + self.link.latency_s, one.down.receives_free_at) + seconds
        one.down.receives_free_at = received

        def arrive(pull: Pull) -> None:
            for chunk in parcel:
                self._receive(one, pull, chunk, seconds)

        self.at(received, self._tell(one, arrive))
        self.at(max(one.up.sends_free_at, received - self.link.latency_s), lambda: self._send(one))

    def _receive(self, one: Subscription, pull: Pull, chunk: int, seconds: float) -> None:
        if self._damages(one.up.name, one.down.name, chunk):
            one.down.damaged += 1
            pull.damaged(chunk, self.now)
        elif pull.arrived(chunk, self.chunk_bytes, seconds, self.now):
            one.down.kept.append(chunk)
            self._arrive_at(one.down, one.source, chunk)()
            if all(other.is_complete for other in one.down.pulls.values()):
                one.down.finished_s = self.now
                self._unfinished.discard(one.down.name)

    def _arrive_at(self, node: Node, source: str, chunk: int) -> Callable[[], None]:
        def arrive() -> None:
            if node.is_dead:
                return
            node.logs[source].append(chunk)
            for one in node.subscribers:
                if one.source == source and one.idle_since is not None:
                    self._send(one)

        return arrive

    def _tell(self, one: Subscription, say: Callable[[Pull], None]) -> Callable[[], None]:
        """Make a message that is handled once it has arrived, and if it is still listened to."""

        def tell() -> None:
            if one.down.is_dead or one.pull.turn != one.turn or one.pull.is_complete:
                return
            if self._later(one.down, tell):
                return
            say(one.pull)
            if one.pull.turn == one.turn:
                self._watch_until_deadline(one.down, one.source)
            else:
                self.at(one.pull.not_before, lambda: self._ask(one.down, one.source))

        return tell

    def _later(self, node: Node, happen: Callable[[], None]) -> bool:
        """Postpone what happens to a node that stands still until it goes on."""
        if node.stands_still_until > self.now:
            self.at(node.stands_still_until, happen)
        return node.stands_still_until > self.now or node.is_dead


def model_s(num_chunks: int, chunk_bytes: int, hops: int, link: Link) -> float:
    """Time of the model, `(C + h - 1) * c / B + h * latency`: of `C` chunks of `c` bytes over `h` hops."""
    return (num_chunks + hops - 1) * chunk_bytes / link.bandwidth + hops * link.latency_s


PAYLOAD_BYTES, CHUNK_BYTES = 2**31, 2**22
NUM_NODES = 128
LINK = Link(bandwidth=1.25e9, latency_s=0.0002)
"""A link of 10 Gbit/s."""
DYING = 0.01


def measure(num_nodes: int, num_sources: int, dying: str, seed: int) -> dict[str, Any]:
    """Measure one version. `dying`: none, or how 1% of the nodes, at least one, die while it is under way."""
    total = PAYLOAD_BYTES // CHUNK_BYTES
    sources = {f"trainer{number}": total // num_sources for number in range(num_sources)}
    receivers = [f"node{number:03}" for number in range(num_nodes)]
    simulated = SimulatedChain(sources, receivers, CHUNK_BYTES, LINK, version=seed)
    model = model_s(total, CHUNK_BYTES, num_nodes, LINK)
    chance = random.Random(seed)
    if dying != "none":
        for name in chance.sample(receivers, math.ceil(DYING * num_nodes)):
            simulated.dies(name, chance.uniform(0.1, 0.9) * model, silently=dying == "machines")
    seconds = simulated.run()
    most_sent = max(node.bytes_sent for node in simulated.nodes.values())
    return {
        "nodes": num_nodes, "sources": num_sources, "dying": dying, "seed": seed, "seconds": seconds, "model_s": model,
        "reparented": simulated.reparented, "unfinished": sum(node.finished_s is None for node in simulated.living),
        "most_sent": most_sent / PAYLOAD_BYTES,
    }  # fmt: skip


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    def worst(value: Callable[[dict[str, Any]], float], *dying: str) -> float:
        return max(value(one) for one in rounds if one["dying"] in dying)

    return [
        Target("no node dies: time over the model's", worst(lambda one: one["seconds"] / one["model_s"], "none"), "x",
               "<=", 1.2),
        Target("1% of the nodes die: what it costs the others", worst(lambda one: one["seconds"] - one["model_s"],
               "processes", "machines"), "s", "<=", 2.0),
        Target("nodes that live and lack chunks", worst(lambda one: one["unfinished"], "none", "processes", "machines"),
               "", "<=", 0.0),
    ]  # fmt: skip


def main() -> None:
    arguments = parse_arguments(__doc__)
    num_nodes = NUM_NODES // 8 if arguments.quick else NUM_NODES
    seeds = range(1 if arguments.quick else arguments.rounds or 3)
    cases = itertools.product((1, 2), ("none", "processes", "machines"), seeds)
    rounds = [measure(num_nodes, num_sources, dying, seed) for num_sources, dying, seed in cases]
    table = new_table(
        f"{PAYLOAD_BYTES / 1e9:.1f} GB to {num_nodes} nodes in virtual time, medians",
        ["nodes with ranks", "who dies"], ["s", "model s", "asked another", "most sent, of the payload"],
    )  # fmt: skip
    for key in dict.fromkeys((one["sources"], one["dying"]) for one in rounds):
        chosen = [one for one in rounds if (one["sources"], one["dying"]) == key]
        columns = ("seconds", "model_s", "reparented", "most_sent")
        middle = [f"{statistics.median(one[name] for one in chosen):.2f}" for name in columns]
        table.add_row(str(key[0]), key[1], *middle)
    show(table)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "simulated_chain", rounds, targets)


if __name__ == "__main__":
    main()
