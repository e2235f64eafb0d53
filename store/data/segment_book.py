"""The life of every segment as a pure state machine: events in, instructions out. No files, no clock.

    with its writer ─ adopt ─▶ LIVE ─ end ─▶ ENDED ─ last use over ─▶ POOLED ─ adopt ─▶ LIVE …
                                │                          └─▶ removed    └─ writer leaves ─▶ removed
                                └─ spilled: on disk from now on, and removed instead of pooled

`segments.py` carries the instructions out. A property test drives it through random histories.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

POOLED_SHARE = 8
"""The part of the budget that may lie idle with the writers (1 / `POOLED_SHARE`), beside what is in use and
preallocated."""
AT_ONCE = 256
"""Segments of a client that has left, in one step."""


class SegmentState(Enum):
    LIVE = "rows lie in it"
    ENDED = "no row lies in it, and a client still reads it"
    POOLED = "with its writer, who may write it again"


@dataclass
class SegmentEntry:
    """A file that the store knows. One that a writer has not handed over yet, or that was removed, is in no state."""

    content: Any
    """The batch that lies in it, as its writer put it."""
    nbytes: int
    on_disk: bool
    node: str = ""
    """The node that it lies on; the store's own has no name."""
    state: SegmentState = SegmentState.LIVE
    uses: Counter[str] = field(default_factory=Counter)
    """Number of readings that have not ended, by client."""
    seen: set[str] = field(default_factory=set)
    """Clients that have it mapped, perhaps, from any batch that lay in it."""


@dataclass
class Instructions:
    """Instructions that an event asks for."""

    recycled: list[str] = field(default_factory=list)
    """Segments that their writers may write again."""
    unmapped: list[tuple[str, set[str]]] = field(default_factory=list)
    """A name, and the clients that must forget their mapping of it."""
    removed: list[tuple[str, bool]] = field(default_factory=list)
    """A name, and whether it lies on disk: no process needs the file any more."""
    removed_remote: list[tuple[str, str]] = field(default_factory=list)
    """A node, and the name of a file there that no process needs any more."""


def writer_of(name: str) -> str:
    """The writer of a segment. Segments are called `<writer>-<number>`."""
    return name.rpartition("-")[0]


class SegmentBook:
    """All segments by name, and the clients that are connected."""

    def __init__(self, max_bytes: int) -> None:
        """Begin an empty book. `max_bytes`: the most that may be in use in the shared memory of each node."""
        self.max_bytes = max_bytes
        self._in_use: Counter[str] = Counter()
        """Bytes in shared memory, in use, by node."""
        self._pooled: Counter[str] = Counter()
        """Bytes in shared memory, with their writers, by node."""
        self.spilled_bytes = 0
        """Bytes on disk."""
        self.segments: dict[str, SegmentEntry] = {}
        self._clients: set[str] = set()
        self._written: dict[str, set[str]] = {}
        """Segments that a writer has written, by writer; it may have left."""
        self._mapped: dict[str, set[str]] = {}
        """Segments that a client may have mapped, by client."""

    @property
    def bytes(self) -> int:
        """Bytes in shared memory, in use."""
        return self._in_use.total()

    def add_client(self, client: str) -> None:
        """Let a client write and read from now on."""
        self._clients.add(client)

    def in_use(self, name: str) -> bool:
        """Return whether rows lie in a segment, or a client reads it."""
        return name in self.segments and self.segments[name].state is not SegmentState.POOLED

    def exceeds_budget(self, nbytes: int, node: str = "") -> bool:
        """Return whether the node's shared memory would be over its budget with so many bytes more in use."""
        return self._in_use[node] + nbytes > self.max_bytes

    def written_by(self, client: str) -> list[str]:
        """Segments that a client has written."""
        return list(self._written.get(client, ()))

    def adopt(self, name: str, content: Any, nbytes: int, on_disk: bool, node: str = "") -> bool:
        """Note that rows lie in a segment from now on; it is not in use. Returns True if its node's shared memory is
        over its budget now."""
        pooled = self._take_out(name)
        seen = pooled.seen if pooled is not None else set[str]()
        segment = self.segments[name] = SegmentEntry(content, nbytes, on_disk, node, seen=seen)
        self._written.setdefault(writer_of(name), set()).add(name)
        for client in seen:
            self._mapped.setdefault(client, set()).add(name)
        self._count(segment, nbytes)
        return self._in_use[node] > self.max_bytes and not on_disk

    def spilled(self, name: str) -> Instructions:
        """Note that a segment was moved to disk."""
        segment = self.segments[name]
        self._count(segment, -segment.nbytes)
        segment.on_disk = True
        self._count(segment, segment.nbytes)
        return Instructions(unmapped=[(name, self._who_maps(name, segment))])

    def begin_reading(self, client: str, name: str) -> None:
        """Note that a reading begins."""
        segment = self.segments[name]
        segment.uses[client] += 1
        segment.seen.add(client)
        self._mapped.setdefault(client, set()).add(name)

    def end_reading(self, client: str, name: str) -> Instructions:
        """Note that a reading has ended. Harmless for one that is not known."""
        segment = self.segments.get(name)
        if segment is None or not segment.uses[client]:
            return Instructions()
        segment.uses[client] -= 1
        return self._settle(name, segment)

    def end(self, name: str) -> Instructions:
        """Note that no row lies in a segment any more."""
        segment = self.segments[name]
        segment.state = SegmentState.ENDED
        return self._settle(name, segment)

    def left(self, client: str) -> Iterator[Instructions]:
        """Note that a client's process has ended: it reads nothing, and writes nothing again. From the first step on
        nothing goes back to it. What it held is released in steps; in between anything may happen, but that it enters
        again."""
        self._clients.discard(client)
        names = [*self._mapped.get(client, ()), *self._written.get(client, ())]
        for start in range(0, len(names), AT_ONCE):
            instructions = Instructions()
            for name in names[start : start + AT_ONCE]:
                if (segment := self.segments.get(name)) is not None:
                    self._release(client, name, segment, instructions)
            yield instructions
        self._mapped.pop(client, None)

    def _release(self, client: str, name: str, segment: SegmentEntry, instructions: Instructions) -> None:
        """Release a segment for a client. Harmless a second time."""
        segment.seen.discard(client)
        del segment.uses[client]
        if segment.state is SegmentState.POOLED and writer_of(name) == client:
            self._remove(name, segment, instructions)
        else:
            self._settle(name, segment, instructions)

    def _settle(self, name: str, segment: SegmentEntry, instructions: Instructions | None = None) -> Instructions:
        """Give a segment back to its writer, or remove it, once no client needs it."""
        instructions = instructions or Instructions()
        if segment.state is not SegmentState.ENDED or +segment.uses:
            return instructions
        fits = self._pooled[segment.node] + segment.nbytes <= self.max_bytes // POOLED_SHARE
        if writer_of(name) in self._clients and not segment.on_disk and fits:
            self._count(segment, -segment.nbytes)
            self._pooled[segment.node] += segment.nbytes
            segment.state = SegmentState.POOLED
            instructions.recycled.append(name)
        else:
            self._remove(name, segment, instructions)
        return instructions

    def _remove(self, name: str, segment: SegmentEntry, instructions: Instructions) -> None:
        self._take_out(name)
        instructions.unmapped.append((name, self._who_maps(name, segment)))
        if segment.node:
            instructions.removed_remote.append((segment.node, name))
        else:
            instructions.removed.append((name, segment.on_disk))

    def _take_out(self, name: str) -> SegmentEntry | None:
        segment = self.segments.pop(name, None)
        if segment is None:
            return None
        own = self._written[writer_of(name)]
        own.discard(name)
        if not own:
            del self._written[writer_of(name)]
        for client in segment.seen:
            self._mapped[client].discard(name)
        if segment.state is SegmentState.POOLED:
            self._pooled[segment.node] -= segment.nbytes
        else:
            self._count(segment, -segment.nbytes)
        return segment

    def _who_maps(self, name: str, segment: SegmentEntry) -> set[str]:
        return ({writer_of(name)} | segment.seen) & self._clients

    def _count(self, segment: SegmentEntry, nbytes: int) -> None:
        if segment.on_disk:
            self.spilled_bytes += nbytes
        else:
            self._in_use[segment.node] += nbytes
