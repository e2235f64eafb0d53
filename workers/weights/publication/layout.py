"""The layout of a safetensors file, computed before any of its bytes exist: the place of each tensor, and the ranges of
elements that have one checksum each. Pure: no I/O, no torch.

Trainer ranks compute the same layout from the same names, shapes and dtypes, and then write their shards into their
places without talking to each other (`publication.py`). They cut what they write into ranges, and say beforehand what
they will cut (`chain/plan.py`), so that both are the same.

Format: 8 bytes header length (little-endian), a JSON header padded with spaces to a multiple of 8, then the tensors
back to back. Widest dtypes come first and names in order within one dtype, as the safetensors library writes them: same
tensors, same bytes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.conf.errors import WeightError, suggest

DTYPES = {
    "int64": (8, "I64"), "float64": (8, "F64"), "float32": (4, "F32"), "int32": (4, "I32"), "bfloat16": (2, "BF16"),
    "float16": (2, "F16"), "int16": (2, "I16"), "int8": (1, "I8"), "uint8": (1, "U8"), "bool": (1, "BOOL"),
}  # fmt: skip
"""Bytes of an element and the format's name of each dtype, in the order in which the library sorts them."""
DTYPE_BYTES = {name: num_bytes for name, (num_bytes, _) in DTYPES.items()}
RANGE_BYTES = 16 * 2**20
"""Largest range that one checksum is for. Readers can check several at a time."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of one tensor in the file. `offset`: bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


@dataclass(frozen=True)
class Layout:
    """The layout of a whole file: its header, and every tensor's place in file order."""

    header: bytes
    tensors: tuple[TensorPlace, ...]

    @cached_property
    def by_name(self) -> dict[str, TensorPlace]:
        return {place.name: place for place in self.tensors}

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(place.num_bytes for place in self.tensors)

    def place(self, name: str) -> TensorPlace:
        """The place of a tensor. Raises `WeightError` with the nearest name."""
        if name not in self.by_name:
            raise WeightError(f"tensor {name!r} is not in the layout{suggest(name, self.by_name)}")
        return self.by_name[name]


def compute_layout(tensors: Iterable[tuple[str, Sequence[int], str]]) -> Layout:
    """The layout of `(name, shape, dtype)` entries, in any order; dtype as torch calls it, without `torch.`.

    Raises `WeightError` for a name that comes twice (a tied weight belongs in once) or an unknown dtype.
    """
    entries = _sorted_entries(tensors)
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = []
    position = 0
    for name, shape, dtype in entries:
        end = position + math.prod(shape) * DTYPE_BYTES[dtype]
        fields[name] = {"dtype": DTYPES[dtype][1], "shape": shape, "data_offsets": [position, end]}
        starts.append(position)
        position = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = tuple(
        TensorPlace(name, dtype, shape, len(header) + start)
        for (name, shape, dtype), start in zip(entries, starts, strict=True)
    )
    return Layout(header, places)


class Chunk(NamedTuple):
    """Range of elements of a flattened tensor that one rank writes."""

    name: str
    first_element: int
    num_elements: int
    rank: int


class ElementRange(NamedTuple):
    """Consecutive elements of one flattened tensor that one rank wrote, and the xxh3-128 of their bytes
    (hexadecimal)."""

    name: str
    first_element: int
    num_elements: int
    checksum: str
    rank: int


@dataclass(frozen=True)
class Outlet:
    """The connection of a rank's writing to its node's relay, which sends to other machines meanwhile
    (`chain/relay.py`). By default there is none."""

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


def byte_span(layout: Layout, entry: Chunk | ElementRange) -> tuple[int, int]:
    """First and last-plus-one byte of a range in the file. Raises `WeightError` for an unknown tensor."""
    place = layout.place(entry.name)
    start = place.offset + entry.first_element * place.element_bytes
    return start, start + entry.num_elements * place.element_bytes


def check_coverage(what: str, layout: Layout, ranges: Iterable[Chunk] | Iterable[ElementRange]) -> None:
    """Check that every element of every tensor is in exactly one range. Raises `WeightError` with the first tensor for
    which it is not so; `what`: whose ranges they are."""
    written: dict[str, list[tuple[int, int]]] = {}
    for entry in ranges:
        written.setdefault(entry.name, []).append((entry.first_element, entry.num_elements))
    for place in layout.tensors:
        spans = sorted(written.get(place.name, []))
        covered, total = _covered(spans), sum(count for _, count in spans)
        if (covered, total) != (place.num_elements, place.num_elements):
            raise WeightError(
                f"{what}: tensor {place.name!r} has {place.num_elements} elements, {total} were written, "
                f"in order up to element {covered}. Every element must be written by exactly one rank."
            )


def _sorted_entries(tensors: Iterable[tuple[str, Sequence[int], str]]) -> list[tuple[str, tuple[int, ...], str]]:
    entries: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for name, shape, dtype in tensors:
        if dtype not in DTYPE_BYTES:
            raise WeightError(f"tensor {name!r}: dtype {dtype!r} cannot be published{suggest(dtype, DTYPE_BYTES)}")
        if name in entries:
            raise WeightError(f"tensor {name!r} is given twice; a weight has one place in a publication.")
        entries[name] = (name, tuple(int(extent) for extent in shape), dtype)
    order = list(DTYPE_BYTES)
    return sorted(entries.values(), key=lambda entry: (order.index(entry[2]), entry[0].encode()))


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Number of elements up to the first gap or overlap of spans (first element, count), which are in order."""
    covered = 0
    for first, count in spans:
        if first != covered:
            break
        covered += count
    return covered
