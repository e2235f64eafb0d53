"""Nodes of a run in one process: each a relay behind a listener of its own, and ranks that write tensors of known
bytes."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from penstock.network.connection import Address
from penstock.network.listener import Listener
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan, Timeouts, make_plan
from penstock.workers.weights.chain.relay import Relay, Reporter
from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter
from penstock.workers.weights.publication.publication_files import MappedWeights

TOKEN = bytes(range(32))
SERVICE = 1
SHAPES = {"embed": (1000, 64), "layer.0": (300, 64), "layer.1": (300, 64), "norm": (64,), "scale": ()}
CHUNK_BYTES = 16 * 1024
UNHURRIED = Timeouts(floor_s=10.0, first_s=10.0)
"""However busy the machine that tests run on is, nobody is given up because of it."""


def values_of(version: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


def plan_of(nodes: list[str], chunk_bytes: int = CHUNK_BYTES) -> ChunkPlan:
    """Each tensor cut into as many pieces as there are ranks. `nodes`: of each rank."""
    layout = compute_layout((name, shape, "bfloat16") for name, shape in SHAPES.items())
    pieces = [[piece_of(name, rank, len(nodes)) for name in SHAPES] for rank in range(len(nodes))]
    return make_plan(layout, pieces, nodes, chunk_bytes)


def piece_of(name: str, rank: int, num_ranks: int) -> tuple[str, int, int]:
    total = torch.Size(SHAPES[name]).numel()
    first, last = rank * total // num_ranks, (rank + 1) * total // num_ranks
    return name, first, last - first


class Cluster:
    """Lifecycle: a context; in it `begin` and `write` for each version, `wait` for what has come of it."""

    def __init__(
        self,
        folder: Path,
        plan: ChunkPlan,
        receivers: list[str],
        timeouts: Timeouts | None = None,
        lanes: int | None = None,
        values: Callable[[int], dict[str, torch.Tensor]] = values_of,
    ) -> None:
        """`lanes`: most of each node. `values`: those of a version."""
        self._values = values
        self.plan, self.receivers, self._lanes = plan, receivers, lanes
        self.relays: dict[str, Relay] = {}
        self.roots: dict[str, Path] = {}
        self.addresses: dict[str, Address] = {}
        self.number = 0
        self._folder, self._timeouts = folder, timeouts or UNHURRIED
        self._stack = ExitStack()
        self._listeners: dict[str, Listener] = {}

    def __enter__(self) -> "Cluster":
        for node in {*self.plan.sources, *self.receivers}:
            self.start(node)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, node: str) -> None:
        self.roots[node] = self._folder / node
        relay = Relay(self.roots[node], node, TOKEN, SERVICE, self._timeouts, self._lanes)
        listener = self._stack.enter_context(Listener("127.0.0.1", TOKEN, {SERVICE: relay.serve}))
        self._stack.callback(relay.close)
        relay.plan(self.plan)
        self.relays[node], self._listeners[node], self.addresses[node] = relay, listener, listener.address

    def kill(self, node: str) -> None:
        """End all connections, and listen no more."""
        self._listeners[node].close()
        self.relays[node].close()

    def begin(self, version: int) -> None:
        self.number += 1
        for relay in self.relays.values():
            relay.begin(Broadcast(self.number, version, self.receivers, self.addresses))

    def write(self, version: int, ranks: list[int] | None = None) -> None:
        """Write a version, all of these ranks at once."""
        threads = [
            threading.Thread(target=self.write_rank, args=(version, rank))
            for rank in (range(len(self.plan.nodes)) if ranks is None else ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def write_rank(self, version: int, rank: int) -> None:
        root = self.roots[self.plan.nodes[rank]]
        values = self._values(version)
        with Reporter(root, self.plan, version, rank) as reporter:
            writer = PublicationWriter(root, version, self.plan.layout, rank, outlet=reporter.outlet)
            for name in SHAPES:
                _, first, count = piece_of(name, rank, len(self.plan.nodes))
                writer.write_elements(name, first, values[name].reshape(-1)[first : first + count])
            writer.close()
            reporter.finish()

    def check(self, version: int, nodes: list[str] | None = None) -> None:
        """Every receiver can load the version, bit for bit."""
        for node in self.receivers if nodes is None else nodes:
            publication = self.relays[node].wait(version, 20)
            mapped = MappedWeights(publication)
            mapped.verify()
            for name, values in self._values(version).items():
                assert torch.equal(mapped.tensor(name), values.bfloat16())
