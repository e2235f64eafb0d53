"""Requests to another node: of each batch there, those rows and columns that a payload takes of it. Pure.

    Payload ─ split ─▶ Wanted, … and the payload as it will be ─ with_pulled ─▶ Payload whose far batches are here

The other end is `server.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from penstock.store.data.layout import Inline, Parcel, Placed
from penstock.store.data.payload import Payload, rows_at


class Wanted(Struct, frozen=True, array_like=True):
    """Rows of the columns `names` of a batch. `places`: `[K, 3]` int64, start, stride and count of each."""

    placed: Placed
    names: list[str]
    places: np.ndarray

    @property
    def num_rows(self) -> int:
        return int(self.places[:, 2].sum())

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Take these rows, and no more, of `batch`: those columns of all rows."""
        zeros = np.zeros((len(self.places), 1), dtype=np.int64)
        return rows_at([batch], self.names, np.hstack([zeros, self.places]), compact=True)


Place = tuple[int, int, int, int]
"""Source, start, stride, count: see `payload.Columns`."""


def split(payload: Payload, is_far: Callable[[Placed], bool]) -> tuple[list[Wanted], Payload]:
    """Return what is to be pulled, and the payload without its far sources: what is pulled follows those that it has,
    in this order. A value that several rows share is pulled once."""
    near: list[Parcel] = []
    number_of: dict[int, int] = {}
    """New number of each near source."""
    for number, source in enumerate(payload.sources):
        if isinstance(source, Inline) or not is_far(source):
            number_of[number] = len(near)
            near.append(source)
    wanted: list[tuple[Any, list[str], list[tuple[int, int, int]]]] = []
    columns = []
    for names, places in payload.columns:
        here: list[Place] = []
        pulled: dict[int, tuple[int, int]] = {}
        """Number of each source among what is wanted, and its rows so far."""
        for source, start, stride, count in places.tolist():
            if source in number_of:
                here.append((number_of[source], start, stride, count))
                continue
            if source not in pulled:
                pulled[source] = len(wanted), 0
                wanted.append((payload.sources[source], names, []))
            number, taken = pulled[source]
            num_rows = count if stride else min(count, 1)
            wanted[number][2].append((start, stride or 1, num_rows))
            pulled[source] = number, taken + num_rows
            _add(here, (len(near) + number, taken, min(stride, 1), count))
        columns.append((names, np.asarray(here, dtype=np.int64).reshape(-1, 4)))
    asked = [Wanted(placed, names, np.asarray(spots, dtype=np.int64)) for placed, names, spots in wanted]
    return asked, Payload(payload.row_ids, payload.group_ids, near, columns)


def with_pulled(payload: Payload, pulled: Sequence[pa.RecordBatch]) -> Payload:
    sources: list[Parcel] = [*payload.sources, *map(Inline, pulled)]
    return Payload(payload.row_ids, payload.group_ids, sources, payload.columns)


def _add(places: list[Place], place: Place) -> None:
    """Add a place, joined with the last one that it follows in the same batch: it is read without a copy then."""
    if places and place[2]:
        source, start, stride, count = places[-1]
        if stride and source == place[0] and start + count == place[1]:
            places[-1] = source, start, stride, count + place[3]
            return
    places.append(place)
