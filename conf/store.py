"""Bounds of the streaming store."""

from dataclasses import dataclass

from penstock.conf.checks import above, at_least


@dataclass
class StoreConfig:
    window: int = 1
    """Window of groups within which they may be trained out of order. 1: strict FIFO. A larger window lets later groups
    overtake a straggler, at the price of `ceil((window - 1) / groups_per_step)` of the staleness bound."""
    max_bytes: int = 4 * 2**30
    """Bytes of resident columns; producers wait above it."""
    lease_timeout_s: float = 60.0
    """Seconds after which a worker whose process gives no sign of life loses its rows to another. A thread of each
    client renews what it holds three times in it, however long the work takes and whatever blocks the worker's event
    loop. Raise it where one call holds Python's lock for longer."""
    inline_bytes: int = 2**16
    """Largest size of a write that travels in the call itself, in bytes; a larger one goes through a file in shared
    memory. Below a megabyte the copy is cheaper than the file."""
    shared_memory_mib: int = 1024
    """Shared memory for large writes, in MiB, on each node that writes some. What exceeds it is moved to that node's
    disk and read from there. Up to an eighth of it, and 128 MiB, is taken at the start, so that the first large batches
    find pages that are there already."""
    spill_dir: str | None = None
    """Disk that the excess is moved to, into a directory of the run's own that goes with it. null: the system's
    temporary directory."""

    def __post_init__(self) -> None:
        at_least("store.window", self.window, 1)
        at_least("store.max_bytes", self.max_bytes, 1)
        at_least("store.shared_memory_mib", self.shared_memory_mib, 1)
        at_least("store.inline_bytes", self.inline_bytes, 0)
        above("store.lease_timeout_s", self.lease_timeout_s, 0)
