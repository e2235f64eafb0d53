"""How long a publication takes, and how long an engine pauses for it, by arithmetic: before a run is started.

    taken     each rank's share cast and copied on its GPU: with max_staleness > 0 a step waits for no more
    written   each rank's share over its GPU's bus into a buffer, and from there into the file, both at once
    brought   to another node by the relays, while it is written
    checked   by the engine that generates on
    paused    the part of each of the engine's GPUs, from the file to the GPU; nothing else happens meanwhile

Rates of the processor were measured (docs/performance.md); those of buses are what is attained of their rate on paper.
No GPU has been seen. Links between nodes are known where a run has measured them: else a version takes at least its
bytes over their rate.
"""

from dataclasses import dataclass

BUSES = {"PCIe 4 x16": 25e9, "PCIe 5 x16": 50e9}
"""Bytes a second in one direction, of 31.5e9 and 63e9 on paper."""
DEVICE_RATE = 1e12
"""Bytes a second that a GPU reads or writes in its memory, at least; assumed."""
MOVED = 3
"""Bytes that are read or written for each byte of a copy: four of float32 are read for two of bfloat16."""
WRITE_RATE = 7.6e9
"""Bytes a second that a thread copies from a buffer into the file and sums."""
RELAY_RATE = 3.2e9
"""Bytes a second that a relay receives, checks and keeps, for each lane and core."""
CHECK_RATE = 6.4e9
"""Bytes a second that a thread reads of a file that was just mapped, and sums."""
COPY_RATE = 12e9
"""Bytes a second that a thread copies: a GPU's driver takes memory that is not page-locked through such a copy."""


@dataclass(frozen=True)
class Way:
    """The way of a version of `num_bytes`."""

    num_bytes: int
    num_ranks: int
    """Ranks of the trainer, each with a GPU and its bus."""
    gpus_per_engine: int
    threads_per_rank: int = 1
    threads_per_node: int = 8
    """Lanes of a relay, and threads of an engine that checks."""
    link: float | None = None
    """Bytes a second from a node to another, where they were measured; None: no slower than relays."""

    @property
    def taken_s(self) -> float:
        return MOVED * self.num_bytes / self.num_ranks / DEVICE_RATE

    def written_s(self, bus: str) -> float:
        return self.num_bytes / self.num_ranks / min(BUSES[bus], WRITE_RATE * self.threads_per_rank)

    @property
    def brought_s(self) -> float:
        relayed = RELAY_RATE * self.threads_per_node
        return self.num_bytes / (relayed if self.link is None else min(relayed, self.link))

    @property
    def checked_s(self) -> float:
        return self.num_bytes / (CHECK_RATE * self.threads_per_node)

    def paused_s(self, bus: str) -> float:
        return self.num_bytes / self.gpus_per_engine / min(BUSES[bus], COPY_RATE)

    def on_one_node_s(self, bus: str) -> float:
        """Seconds from the step's end until an engine pauses, on the ranks' node."""
        return self.written_s(bus) + self.checked_s

    def between_nodes_s(self, bus: str) -> float:
        """The same on another node, where the link is no slower than the relays."""
        return max(self.written_s(bus), self.brought_s) + self.checked_s
