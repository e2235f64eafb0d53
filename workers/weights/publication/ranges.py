"""Ranges of elements: each has one checksum, and pieces of tensors are cut into them. Pure: no I/O, no torch.

Ranks cut what they write (`publication.py`), and say beforehand what they will cut (`chain/plan.py`), so that both are
the same ranges.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.conf.errors import WeightError
from penstock.workers.weights.publication.layout import Layout, TensorPlace

RANGE_BYTES = 16 * 2**20
"""Largest range that one checksum is for. Readers can check several at a time."""


class ElementRange(NamedTuple):
    """Consecutive elements of one flattened tensor that one rank wrote, and the xxh3-128 of their bytes
    (hexadecimal)."""

    name: str
    first_element: int
    num_elements: int
    checksum: str
    rank: int


class Elements(Protocol):
    """The fields of a range that a check of coverage needs."""

    @property
    def name(self) -> str: ...
    @property
    def first_element(self) -> int: ...
    @property
    def num_elements(self) -> int: ...


@dataclass(frozen=True)
class Outlet:
    """The connection of a rank's writing to its node's relay, which sends to other machines meanwhile
    (`chain/reports.py`). By default there is none."""

    range_bytes: int = RANGE_BYTES
    """Largest size of a range, in bytes."""
    spans: Sequence[tuple[int, int]] | None = None
    """Bytes of the file, first and last-plus-one, that this node's ranks write. None: all of it."""
    written: Callable[[ElementRange], None] | None = None
    """Callback for each range whose bytes are there and stay as they are; from any thread."""


NO_OUTLET = Outlet()


def cut(place: TensorPlace, first_element: int, num_elements: int, range_bytes: int) -> Iterator[tuple[int, int]]:
    """First element and length of each range of a piece, of at most `range_bytes`. An empty piece has none."""
    size = max(1, range_bytes // place.element_bytes)
    end = first_element + num_elements
    for start in range(first_element, end, size):
        yield start, min(size, end - start)


def byte_span(layout: Layout, entry: Elements) -> tuple[int, int]:
    """First and last-plus-one byte of a range in the file. Raises `WeightError` for an unknown tensor."""
    place = layout.place(entry.name)
    start = place.offset + entry.first_element * place.element_bytes
    return start, start + entry.num_elements * place.element_bytes


def check_coverage(what: str, layout: Layout, ranges: Iterable[Elements]) -> None:
    """Check that every element of every tensor is in exactly one range. Raises `WeightError` with the first tensor for
    which it is not so; `what`: whose ranges they are."""
    written: dict[str, list[Elements]] = {}
    for entry in ranges:
        written.setdefault(entry.name, []).append(entry)
    for place in layout.tensors:
        parts = sorted(written.get(place.name, []), key=lambda part: part.first_element)
        covered = _covered(parts)
        total = sum(entry.num_elements for entry in parts)
        if (covered, total) != (place.num_elements, place.num_elements):
            raise WeightError(
                f"{what}: tensor {place.name!r} has {place.num_elements} elements, {total} were written, "
                f"in order up to element {covered}. Every element must be written by exactly one rank."
            )


def _covered(parts: Sequence[Elements]) -> int:
    covered = 0
    for entry in parts:
        if entry.first_element != covered:
            break
        covered += entry.num_elements
    return covered
