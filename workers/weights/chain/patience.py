"""The time that a node waits for its upstream before it asks another one. Pure: times are arguments.

An upstream that has nothing to send says so, `heartbeat_s` after its last message. So silence means that the upstream
or the connection is gone.
"""

import statistics
from collections import deque
from dataclasses import dataclass

SAMPLES = 9
"""Number of samples that the median is taken of: few, so that a link that has become slow is soon known as such."""
LEAST_SAMPLE_BYTES = 2**16
"""Smallest chunk that is timed. The time of a smaller one is below the clock's resolution and says nothing of the
link."""


@dataclass(frozen=True)
class Patience:
    heartbeat_s: float = 0.05
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


class Pace:
    """Times of the chunks of one chain, from version to version."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._seconds_per_byte: deque[float] = deque(maxlen=SAMPLES)

    def timed(self, num_bytes: int, seconds: float) -> None:
        """Note that a chunk took so many seconds from its beginning to its end."""
        if num_bytes >= LEAST_SAMPLE_BYTES:
            self._seconds_per_byte.append(seconds / num_bytes)

    def silence_s(self, chunk_bytes: int) -> float:
        """Seconds for which nothing may come where chunks of at most `chunk_bytes` are sent."""
        if not self._seconds_per_byte:
            return self._patience.first_s
        median = statistics.median(self._seconds_per_byte) * chunk_bytes
        return max(self._patience.floor_s, self._patience.factor * median)
