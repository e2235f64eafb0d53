"""How long a node waits for its upstream before it asks another one. Pure: times are arguments.

An upstream that has nothing to send says so, `heartbeat_s` after it last said anything. So silence means that it, or
the way to it, is gone.
"""

import statistics
from collections import deque
from dataclasses import dataclass

SAMPLES = 9
"""Of which the median is taken: few, so that a link that has become slow is soon known as such."""
LEAST_SAMPLE_BYTES = 2**16
"""What arrives faster than its clock ticks says nothing of the link."""


@dataclass(frozen=True)
class Patience:
    heartbeat_s: float = 0.05
    factor: float = 3.0
    """Of the median time of a chunk."""
    floor_s: float = 0.2
    """Not less, however fast chunks are: processes stand still for so long when a machine is busy."""
    first_s: float = 1.0
    """Before any chunk has been timed."""
    slow: float = 4.0
    """So many times that may a chunk be under way, as long as some of it comes: links are shared, and seldom evenly."""
    cut_off: float = 4.0
    """So many times that, since the trainer's node was last heard of through all that lie between, and the upstream
    stands on the wrong side of a cut. Its own upstream is nearer to it: it has had the time to ask another."""


class Pace:
    """Times of the chunks of one chain, from version to version."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._seconds_per_byte: deque[float] = deque(maxlen=SAMPLES)

    def timed(self, num_bytes: int, seconds: float) -> None:
        """So long after its beginning the end of a chunk came."""
        if num_bytes >= LEAST_SAMPLE_BYTES:
            self._seconds_per_byte.append(seconds / num_bytes)

    def silence_s(self, chunk_bytes: int) -> float:
        """How long nothing may come where chunks of at most `chunk_bytes` are sent."""
        if not self._seconds_per_byte:
            return self._patience.first_s
        median = statistics.median(self._seconds_per_byte) * chunk_bytes
        return max(self._patience.floor_s, self._patience.factor * median)
