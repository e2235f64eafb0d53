"""Bounds of the streaming store."""

from dataclasses import dataclass

from penstock.conf.checks import above, at_least


@dataclass
class StoreConfig:
    window: int = 1
    """Groups may be trained out of order within a window of so many. 1: strict FIFO. A larger window lets later groups
    overtake a straggler, at the price of `ceil((window - 1) / groups_per_step)` of the staleness bound."""
    max_bytes: int = 4 * 2**30
    """Bytes of resident columns; producers wait above it."""
    lease_timeout_s: float = 600.0
    """A worker that neither writes nor renews for so long loses its rows to another."""
    inline_bytes: int = 65536
    """A write smaller than this travels in the call itself; a larger one goes through shared memory."""

    def __post_init__(self) -> None:
        at_least("store.window", self.window, 1)
        at_least("store.max_bytes", self.max_bytes, 1)
        at_least("store.inline_bytes", self.inline_bytes, 0)
        above("store.lease_timeout_s", self.lease_timeout_s, 0)
