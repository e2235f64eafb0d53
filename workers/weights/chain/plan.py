"""The plan by which weights go to other nodes: the chunks of every version, and the chain of nodes that they pass.
Pure.

    chunks       which bytes of the file each is, which rank writes it, and on which node that rank is
    version 12   trainer X ─▶ a ─▶ b ─▶ c      trainer Y ─▶ b ─▶ c ─▶ a
    version 13   trainer X ─▶ b ─▶ c ─▶ a      trainer Y ─▶ c ─▶ a ─▶ b

Ranks cut the same pieces of the same tensors for every version, so they tell once what they will write, before the
first version; the plan is checked once, and both ends of every connection know what a chunk's number means. The
trainer's ranks make it (`trainer/publishing.py`), and it goes to the nodes' relays as plain data (`relay.py`).

For each node that has trainer ranks there is one chain of the receiving nodes. Their order turns with the version and
from chain to chain, so that no node is always the last, and in a version each sends about as much as any other. Every
node computes the same, so no node has to be told its place.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import xxhash

from penstock.network.connection import Address
from penstock.workers.weights.publication.layout import (
    RANGE_BYTES,
    Layout,
    byte_span,
    check_coverage,
    compute_layout,
    cut,
)

LEAST_BYTES = 2**20
"""Smallest chunk, unless the data is smaller. A chunk costs a relay's processor about 0.1 ms, whatever is in it: the
time of that many bytes at 10 GB/s."""
FILLING = 16
"""Denominator of the largest share of a version's time that filling a chain may take, as long as `LEAST_BYTES` allows
it. A chain is full when its last node gets its first chunk."""
LANE_BYTES = 2**28
"""Fewest bytes that a lane is opened for: a connection and a thread cost about as much as a few MB."""
NEARBY = 3
"""Nodes of the chain that are asked before its trainer is: a node that dies then costs its neighbours little, and all
nodes share the trainer's link."""


class Chunk(NamedTuple):
    """Range of elements of a flattened tensor that one rank writes."""

    name: str
    first_element: int
    num_elements: int
    rank: int


class Lane(NamedTuple):
    """A share of the chunks of a chain that comes over a connection of its own, in a thread of its own."""

    source: str
    """The node where the chain begins."""
    number: int


PieceSpan = tuple[str, int, int]
"""Tensor, first element and number of elements of a piece that a rank will write."""


class ChunkPlan(msgspec.Struct, frozen=True, dict=True):
    """The plan of all chunks, which are known by their number: their place in `chunks`. Frozen, and equal wherever it
    is read.

    plan = make_plan(layout, pieces_of_ranks, nodes, chunk_bytes)
    start, end = plan.spans[plan.of_node(nodes[0])[0]]
    """

    tensors: list[tuple[str, tuple[int, ...], str]]
    """Name, shape, dtype of each tensor."""
    chunks: list[Chunk]
    nodes: list[str]
    """Node of each rank."""
    chunk_bytes: int
    """Largest size of a chunk, in bytes."""

    @cached_property
    def layout(self) -> Layout:
        return compute_layout(self.tensors)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First and last-plus-one byte of each chunk in the file."""
        return [byte_span(self.layout, chunk) for chunk in self.chunks]

    @cached_property
    def sources(self) -> list[str]:
        """Nodes that have ranks, each once: there is a chain for each."""
        return list(dict.fromkeys(self.nodes))

    @cached_property
    def numbers(self) -> dict[tuple[str, int], int]:
        """Numbers of chunks, by tensor and first element."""
        return {(chunk.name, chunk.first_element): number for number, chunk in enumerate(self.chunks)}

    @cached_property
    def digest(self) -> bytes:
        """Digest of the plan: two relays with different plans do not understand each other."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self))

    def of_node(self, node: str) -> list[int]:
        """Numbers of the chunks that ranks of this node write."""
        return [number for number, chunk in enumerate(self.chunks) if self.nodes[chunk.rank] == node]

    def spans_of_node(self, node: str) -> list[tuple[int, int]]:
        """Byte ranges that ranks of this node write, the header included, in order of the file."""
        return [(0, len(self.layout.header)), *sorted(self.spans[number] for number in self.of_node(node))]


def make_plan(
    layout: Layout, pieces: Sequence[Iterable[PieceSpan]], nodes: Sequence[str], chunk_bytes: int = RANGE_BYTES
) -> ChunkPlan:
    """Make the plan from the pieces that each rank will write. `nodes`: the node of each rank.

    Raises `WeightError` with the tensor whose elements no rank, or two ranks, will write.
    """
    chunks = [
        Chunk(name, start, size, rank)
        for rank, told in enumerate(pieces)
        for name, first, count in told
        for start, size in cut(layout.place(name), first, count, chunk_bytes)
    ]
    check_coverage("the ranks' pieces", layout, chunks)
    tensors = [(place.name, place.shape, place.dtype) for place in layout.tensors]
    return ChunkPlan(tensors, chunks, list(nodes), chunk_bytes)


def choose_chunk_bytes(num_bytes: int, num_sources: int, num_receivers: int) -> int:
    """Choose the size of chunks: as large as allowed, but for long chains of little data.

    `C` chunks over `h` hops take the time of `C + h - 1` chunks (`benchmarks/simulated_chain.py`): `h - 1` is to be
    little beside `C`.
    """
    filling = max(1, num_receivers - 1) * FILLING
    return min(RANGE_BYTES, max(LEAST_BYTES, num_bytes // num_sources // filling))


def lanes_of(plan: ChunkPlan, source: str, most: int) -> dict[Lane, list[int]]:
    """The chunks of a chain by lane. Large data has as many lanes as are allowed, `most`, and at least one; each gets
    the next `chunk_bytes` in turn, so that all are at the same place of what ranks write."""
    chunks = plan.of_node(source)
    sizes = [end - start for start, end in (plan.spans[chunk] for chunk in chunks)]
    num_lanes = max(1, min(most, sum(sizes) // LANE_BYTES))
    lanes: dict[Lane, list[int]] = {Lane(source, number): [] for number in range(num_lanes)}
    before = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        lanes[Lane(source, before // plan.chunk_bytes % num_lanes)].append(chunk)
        before += size
    return lanes


class Broadcast(msgspec.Struct, frozen=True):
    """The announcement of a version that goes to many nodes; each of them gets it before the ranks write."""

    number: int
    """Number among broadcasts: greater than any before, also where a version is sent again because it has failed."""
    version: int
    receivers: list[str]
    """Nodes that are to get all of it."""
    addresses: dict[str, Address]
    """Address of the listener of every node that has ranks or receives."""


def chain(broadcast: Broadcast, sources: Sequence[str], source: str) -> list[str]:
    """The nodes after `source`, which has trainer ranks, in the order in which its chunks pass them."""
    others = [node for node in sorted(broadcast.receivers) if node != source]
    if not others:
        return []
    apart = max(1, len(others) // len(sources))
    first = (broadcast.version + sources.index(source) * apart) % len(others)
    return others[first:] + others[:first]


def upstreams(order: Sequence[str], source: str, node: str) -> list[str]:
    """Nodes that a node of the chain asks for chunks, best first. All are before it, so that no two ask each other."""
    place = order.index(node)
    return [*reversed(order[max(0, place - NEARBY) : place]), source]
