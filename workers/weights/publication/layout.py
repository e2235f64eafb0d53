"""The place of each tensor in a safetensors file, computed before any of its bytes exist.

Trainer ranks compute the same layout from the same names, shapes and dtypes, and then write their shards into their
places without talking to each other (`publication.py`). Pure: no I/O, no torch.

Format: 8 bytes header length (little-endian), a JSON header padded with spaces to a multiple of 8, then the tensors
back to back. Widest dtypes come first and names in order within one dtype, as the safetensors library writes them: same
tensors, same bytes.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.conf.errors import WeightError, suggest

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, in the order in which the library sorts dtypes."""
DTYPE_CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class TensorPlace:
    """The place of one tensor in the file. `offset`: bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_rows(self) -> int:
        """Extent of dim 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])

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
        fields[name] = {"dtype": DTYPE_CODES[dtype], "shape": shape, "data_offsets": [position, end]}
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
