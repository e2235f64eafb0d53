"""The plan by which weights go to other nodes, and one node's decisions in it. Pure: times are arguments.

    chunks       which bytes of the file each is, which rank writes it, and on which node that rank is
    version 12   trainer X ─▶ a ─▶ b ─▶ c      trainer Y ─▶ b ─▶ c ─▶ a
    version 13   trainer X ─▶ b ─▶ c ─▶ a      trainer Y ─▶ c ─▶ a ─▶ b

Ranks cut the same pieces of the same tensors for every version, so they say once what they will write, before the first
version; the plan is checked once, and both ends of every connection know what a chunk's number means. The trainer's
ranks make it (`trainer/publishing.py`), and it goes to the nodes' relays as plain data (`relay.py`).

For each node that has trainer ranks there is one chain of the receiving nodes. Their order turns with the version and
from chain to chain, so that no node is always the last, and in a version each sends about as much as any other. Every
node computes the same, so that no node needs a message about its place.

A node's part in one chain (`Pull`): which chunks it has, which upstream it asks for the missing ones, and when it
asks another.

    ask(upstream, missing) ─▶ arrived(chunk)* ─▶ … ─▶ ended      complete, or ask again for what was damaged
                              waiting(age_s)                      the upstream has nothing new, and says so
                              lost | no word until `deadline`     ask the next upstream, for what is missing

An upstream that has nothing to send says so, `heartbeat_s` after its last message: silence means that the upstream or
the connection is gone. It says with it how long ago the trainer's node was heard of, through all nodes between. So a
node knows it, too, when its upstream is alive but cut off from the trainer. `subscription.Puller` runs it with sockets,
`benchmarks/simulated_chain.py` with a virtual clock.
"""

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import xxhash

from penstock.network.connection import Address
from penstock.workers.weights.publication.layout import (
    RANGE_BYTES,
    Chunk,
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


class Lane(NamedTuple):
    """A share of the chunks of a chain, received over its own connection and by its own thread."""

    source: str
    """The node where the chain begins."""
    number: int


PieceSpan = tuple[str, int, int]
"""Tensor, first element and number of elements of a piece that a rank will write."""


class ChunkPlan(msgspec.Struct, frozen=True, dict=True):
    """The plan of all chunks, which are known by their number: their place in `chunks`. Frozen, and equal wherever it
    is read.

    plan = make_plan(layout, pieces_of_ranks, nodes, chunk_bytes)
    start, end = plan.spans[plan.chunks_from_node(nodes[0])[0]]
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

    def chunks_from_node(self, node: str) -> list[int]:
        """Numbers of the chunks that ranks of this node write."""
        return [number for number, chunk in enumerate(self.chunks) if self.nodes[chunk.rank] == node]

    def spans_from_node(self, node: str) -> list[tuple[int, int]]:
        """Byte ranges that ranks of this node write, the header included, in order of the file."""
        return [(0, len(self.layout.header)), *sorted(self.spans[number] for number in self.chunks_from_node(node))]


def make_plan(
    layout: Layout, pieces: Sequence[Iterable[PieceSpan]], nodes: Sequence[str], chunk_bytes: int = RANGE_BYTES
) -> ChunkPlan:
    """Make the plan from the pieces that each rank will write. `nodes`: the node of each rank.

    Raises `WeightError` with the tensor whose elements no rank, or two ranks, will write.
    """
    chunks = [
        Chunk(name, start, size, rank)
        for rank, spans in enumerate(pieces)
        for name, first, count in spans
        for start, size in cut(layout.place(name), first, count, chunk_bytes)
    ]
    check_coverage("the ranks' pieces", layout, chunks)
    tensors = [(place.name, place.shape, place.dtype) for place in layout.tensors]
    return ChunkPlan(tensors, chunks, list(nodes), chunk_bytes)


def choose_chunk_bytes(num_bytes: int, num_sources: int, num_receivers: int) -> int:
    """Choose the size of chunks: as large as allowed, but for long chains of little data.

    `C` chunks over `h` hops take the time of `C + h - 1` chunks (`benchmarks/simulated_chain.py`): `h - 1`
    must be small beside `C`.
    """
    filling = max(1, num_receivers - 1) * FILLING
    return min(RANGE_BYTES, max(LEAST_BYTES, num_bytes // num_sources // filling))


def lanes_of(plan: ChunkPlan, source: str, most: int) -> dict[Lane, list[int]]:
    """The chunks of a chain by lane. Large data has as many lanes as are allowed, `most`, and at least one; each gets
    the next `chunk_bytes` in turn, so that all lanes progress with the ranks that write."""
    chunks = plan.chunks_from_node(source)
    sizes = [end - start for start, end in (plan.spans[chunk] for chunk in chunks)]
    num_lanes = max(1, min(most, sum(sizes) // LANE_BYTES))
    lanes: dict[Lane, list[int]] = {Lane(source, number): [] for number in range(num_lanes)}
    before = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        lanes[Lane(source, before // plan.chunk_bytes % num_lanes)].append(chunk)
        before += size
    return lanes


class Broadcast(msgspec.Struct, frozen=True):
    """The announcement of a version to all nodes that take part, before the ranks write."""

    number: int
    """Number among broadcasts: greater than any before, also where a version is sent again because it has failed."""
    version: int
    receivers: list[str]
    """Nodes that receive all of it."""
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


MOST_DAMAGED = 8
"""Number of times that one chunk may arrive damaged. More are no accident of a link."""
PAUSE_S, MOST_PAUSE_S = 0.05, 1.0
"""Seconds of the first and of the longest pause after all upstreams have been asked in vain; it doubles each time."""
SAMPLES = 9
"""Number of samples that the median is taken of: few, so that a link that has become slow is soon known as such."""
LEAST_SAMPLE_BYTES = 2**16
"""Smallest chunk that is timed. The time of a smaller one is below the clock's resolution and says nothing of the
link."""


@dataclass(frozen=True)
class Timeouts:
    """The times after which a node asks another upstream."""

    heartbeat_s: float = 0.05
    """Seconds without news after which an upstream says so."""
    factor: float = 3.0
    """Longest silence, in median times of a chunk."""
    floor_s: float = 0.2
    """Least seconds of silence, however fast chunks are: processes may stop for so long when a machine is busy."""
    first_s: float = 1.0
    """Seconds of silence before any chunk has been timed."""
    slow: float = 4.0
    """Longest time of a chunk in transit, in longest silences, as long as some of it comes: links are shared, and
    seldom evenly."""
    cut_off: float = 4.0
    """Longest time since the trainer's node was last heard of through the chain, in longest silences. After it the
    upstream is taken to be cut off from that node. Its own upstream is nearer to the node: it has had the time to ask
    another."""


class ChunkTimes:
    """Times of the chunks of one chain, from version to version."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._seconds_per_byte: deque[float] = deque(maxlen=SAMPLES)

    def timed(self, num_bytes: int, seconds: float) -> None:
        """Note that a chunk took so many seconds from its beginning to its end."""
        if num_bytes >= LEAST_SAMPLE_BYTES:
            self._seconds_per_byte.append(seconds / num_bytes)

    @property
    def seconds_per_byte(self) -> float:
        """The mean, since a chunk that arrives quickly came while another was received; 0: none has been timed."""
        return statistics.fmean(self._seconds_per_byte) if self._seconds_per_byte else 0.0

    def silence_s(self, chunk_bytes: int) -> float:
        """Longest silence, in seconds, where chunks have at most `chunk_bytes`."""
        if not self._seconds_per_byte:
            return self._timeouts.first_s
        median = statistics.median(self._seconds_per_byte) * chunk_bytes
        return max(self._timeouts.floor_s, self._timeouts.factor * median)


class Pull:
    """Lifecycle: made when the version begins. Then, until `is_complete` or `failure`: ask `upstream` for `missing`,
    not before `not_before`, and report what arrives, until `turn` changes."""

    def __init__(
        self,
        chunks: Iterable[int],
        upstreams: Sequence[str],
        chunk_bytes: int,
        chunk_times: ChunkTimes,
        timeouts: Timeouts,
        now: float,
    ) -> None:
        """`chunks`: numbers of the chain's chunks. `upstreams`: best first; the last is the node with the ranks.
        `chunk_bytes`: size of the largest chunk. `chunk_times`: of the chain's earlier versions."""
        self.missing = set(chunks)
        self.turn = 0
        """Number that changes when the upstream is to be asked again."""
        self.not_before = now
        self.failure: str | None = None
        """The reason why the pull will never be complete."""
        self.reparented = 0
        self._upstreams = list(upstreams)
        self._chunk_times, self._timeouts, self._chunk_bytes = chunk_times, timeouts, chunk_bytes
        self._index = 0
        self._damaged: Counter[int] = Counter()
        self._heard = now
        """Time when anything came last."""
        self._told = now
        """Time when a whole chunk or message came last."""
        self._source_heard = now
        """Time when the trainer's node was last known to be alive."""
        self._in_vain = 0
        """Upstreams replaced since the last chunk came."""

    @property
    def upstream(self) -> str:
        return self._upstreams[self._index]

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def deadline(self) -> float:
        """Time when silence, or one chunk, has lasted too long. It grows with each upstream that was replaced in vain:
        where all are slow, one of them must get the time to answer."""
        timeout_s = self._silence_s * 2 ** min(self._in_vain, 6)
        return min(self._heard + timeout_s, self._told + self._timeouts.slow * timeout_s)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds per byte of whole chunks from the upstreams; 0: not known."""
        return self._chunk_times.seconds_per_byte

    def source_age_s(self, now: float) -> float:
        """Seconds since the last sign of the trainer's node, for the downstreams that wait for this node."""
        return now - self._source_heard

    def connected(self, now: float) -> None:
        """Note that the upstream has answered."""
        self._heard = self._told = now

    def progressed(self, now: float) -> None:
        """Note that some of a chunk has come."""
        self._heard = now

    def arrived(self, chunk: int, num_bytes: int, seconds: float, now: float) -> bool:
        """Note a chunk with the right digest, received within so many seconds. False: it was there already."""
        self._heard = self._told = self._source_heard = now
        self._in_vain = 0
        self._chunk_times.timed(num_bytes, seconds)
        is_new = chunk in self.missing
        self.missing.discard(chunk)
        return is_new

    def damaged(self, chunk: int, now: float) -> None:
        """Note a chunk with another digest. It is fetched again when the upstream has sent everything else, and if that
        is damaged too, from another upstream."""
        self._heard = self._told = now
        self._damaged[chunk] += 1
        if self._damaged[chunk] >= MOST_DAMAGED:
            self.failure = f"chunk {chunk} came damaged {MOST_DAMAGED} times, last from {self.upstream}"
        elif self._damaged[chunk] > 1:
            self._take_next(now)

    def waiting(self, source_age_s: float, now: float) -> None:
        """Note that the upstream has nothing new. `source_age_s`: seconds since it had a sign of the trainer's node."""
        self._heard = self._told = now
        self._source_heard = max(self._source_heard, now - source_age_s)
        if self.source_age_s(now) > self._timeouts.cut_off * self._silence_s:
            self._source_heard = now  # the next upstream gets as much time
            self._take_next(now)

    def ended(self, now: float) -> None:
        """Note that the upstream has sent every requested chunk."""
        if self.missing:
            self._ask_again(now)

    def lost(self, now: float) -> None:
        """Note that the connection failed, that nothing has come until `deadline`, or that the upstream no longer has
        the version."""
        self._take_next(now)

    @property
    def _silence_s(self) -> float:
        return self._chunk_times.silence_s(self._chunk_bytes)

    def _take_next(self, now: float) -> None:
        self._index = (self._index + 1) % len(self._upstreams)
        self._in_vain += 1
        self.reparented += 1
        rounds = self._in_vain // len(self._upstreams)
        pause = min(MOST_PAUSE_S, PAUSE_S * 2 ** min(rounds, 8)) if self._index == 0 else 0.0
        self._ask_again(now + pause)

    def _ask_again(self, at: float) -> None:
        self.turn += 1
        self._heard = self._told = self.not_before = at
