"""The version before on a node, and the differences of a version's chunks to it (`difference.py`).

    node X    v11 in one file, v12 being written into the other: 2% of its words differ
    node a    v11, sealed
    X ─ the difference of chunk 7 to v11, digest of chunk 7 in v12 ─▶ a, which checks what it makes of it, and sends on
                                                                      the same bytes to a node that has v11 too

A base need not be trusted: nodes name it by the digests of its chunks, and a chunk that is made of a difference must
have the digest that the rank reported.
"""

import threading
import time
from collections.abc import Mapping

import xxhash

from penstock.workers.weights.chain.difference import difference
from penstock.workers.weights.chain.plan import ChunkPlan
from penstock.workers.weights.chain.slot import Slot

WORTH = 0.5
"""Largest share of a chunk's bytes that a difference may have."""
UNKNOWN_S = 8e-9
"""Seconds that a byte takes on a link which has not been timed: 1 Gbit/s."""


class Base:
    """The chunks of the version before. Lifecycle: made when the next version begins, from the slot, which stays
    locked; `close`."""

    def __init__(self, slot: Slot, plan: ChunkPlan, digests: Mapping[int, bytes]) -> None:
        """`digests`: of the chunks that are there."""
        self._slot, self.plan, self._digests = slot, plan, dict(digests)

    def name(self, source: str) -> bytes:
        """The name of the chunks of a chain: the same on all nodes with the same bytes. Empty: some are missing."""
        digests = [self._digests.get(chunk, b"") for chunk in self.plan.of_node(source)]
        return xxhash.xxh3_128_digest(b"".join(digests)) if all(digests) else b""

    def bytes_of(self, chunk: int) -> memoryview:
        return self._slot.memory(chunk)

    def close(self) -> None:
        self._slot.close()


class Differences:
    """Differences of the chunks of one version to its base, made as they are asked for, each once. Threads share it."""

    def __init__(self, base: Base | None) -> None:
        """`base`: None where the node has no version before; it then sends whole chunks."""
        self.base = base
        self._made: dict[int, bytes | None] = {}
        self._lock = threading.Lock()
        self._pays = True
        """False once a difference has taken longer to make and send than its chunk to send."""

    def name(self, source: str) -> bytes:
        """The name of the base, as far as a chain is concerned; empty: there is none."""
        return b"" if self.base is None else self.base.name(source)

    def of(self, chunk: int, new: memoryview, seconds_per_byte: float) -> bytes | None:
        """The difference of a chunk; None: it is to be sent whole. `seconds_per_byte`: of the link; 0: not known."""
        assert self.base is not None
        with self._lock:
            if chunk in self._made or not self._pays:
                return self._made.get(chunk)
        began = time.thread_time()  # not the clock: other work on this core says nothing of the next chunk
        made = difference(self.base.bytes_of(chunk), new)
        seconds = time.thread_time() - began
        if made is not None and len(made) > WORTH * len(new):
            made = None
        saved_s = (len(new) - len(made or new)) * (seconds_per_byte or UNKNOWN_S)
        with self._lock:
            self._made[chunk] = made
            self._pays = saved_s > seconds
        return made

    def keep(self, chunk: int, made: bytes) -> None:
        """Keep a difference that came from another node, for the nodes that ask this one."""
        with self._lock:
            self._made[chunk] = made

    def close(self) -> None:
        with self._lock:
            self._made.clear()
            self._pays = False
        if self.base is not None:
            self.base.close()
