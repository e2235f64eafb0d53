"""The order in which a node sends chunks to a subscriber, and the parcels that it sends together. Pure."""

from collections.abc import Collection, Sequence

SMALL_BYTES = 2**16
"""Largest chunk that is sent together with others: a model has many vectors, an adapter nothing else."""
PARCEL_BYTES, PARCEL_CHUNKS = 2**20, 256
"""Most bytes and most chunks that are sent together."""


class Feed:
    """The place of one subscriber in the order in which chunks have come to this node."""

    def __init__(self, log: Sequence[int], wanted: Collection[int], spans: Sequence[tuple[int, int]]) -> None:
        """`log`: numbers of the chunks that are here; it grows. `spans`: of all chunks in the file."""
        self._log, self._wanted, self._spans = log, set(wanted), spans
        self._position = 0

    @property
    def is_over(self) -> bool:
        """True once all wanted chunks have been sent."""
        return not self._wanted

    def next_parcel(self) -> list[int]:
        """Take the chunks to be sent together; none: there is nothing new."""
        parcel: list[int] = []
        room = PARCEL_BYTES
        while self._position < len(self._log) and len(parcel) < PARCEL_CHUNKS:
            chunk = self._log[self._position]
            if chunk in self._wanted:
                start, end = self._spans[chunk]
                is_small = end - start <= SMALL_BYTES
                if parcel and (not is_small or end - start > room):
                    break
                parcel.append(chunk)
                room -= end - start
                self._wanted.discard(chunk)
                if not is_small:
                    self._position += 1
                    break
            self._position += 1
        return parcel
