"""Columns in Arrow: conversion of a worker's values, the facts that the ledger needs, and refusal of what does not fit.

It runs on the worker's side, before anything is sent. `encode` is all or nothing: it raises, or returns a batch that
the store takes as it is.

Blobs are values of dtype `binary`, each a string of bytes of any length, as pictures are:

    list column   offsets │ views │ blob │ blob │ …      Arrow's binary views: 16 bytes a value, which say where it lies
    sample column           views │ blob │ blob │ …      or, up to 12 bytes long, are the value

Rows that are copied copy views. So all rows that share a blob share its memory, within a write and in each of its
readers, and all blobs of a batch may be larger than 2 GiB together. Each blob is a buffer of its own: a part of a batch
is its views and those of the buffers that they name (`compact_blobs`), and no blob is copied to send it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.ma  # what Arrow looks for in the first array that it is given, 14 ms too late
import pyarrow as pa
import xxhash

from penstock.algorithms.graph.columns import Column
from penstock.conf.errors import suggest
from penstock.store.errors import NotFinite, UnknownColumn, WrongLength, WrongType
from penstock.store.ledger.group import NO_VERSION, Facts

_SCALARS = {
    "uint8": pa.uint8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary_view(),
}
ARROW_TYPES = {str(kind): kind for scalar in _SCALARS.values() for kind in (scalar, pa.list_(scalar))}
"""Every type that a column may have, as Arrow prints it."""
_NUMPY: "dict[str, np.dtype[Any]]" = {
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "float32": np.dtype(np.float32),
}
"""Dtypes whose arrays look in Arrow as they do in numpy."""
_KINDS = {"uint8": "iu", "int32": "iu", "int64": "iu", "float32": "fiu", "bool": "b"}
"""Letters of numpy for the kinds that each dtype takes."""
_LISTS, _NUMBERS = {list, tuple}, {int, float, bool, str}
"""Types of values that need no check of each value, of a ragged column and of one of scalars."""
Allocate = Callable[[int], "np.ndarray | None"]
"""Memory of so many bytes to put a column into, uint8; None if there is no more."""
_MISFIT = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError, TypeError)
VIEW = np.dtype([("size", "<i4"), ("prefix", "V4"), ("buffer", "<i4"), ("offset", "<i4")])
"""A view of a value that is longer than `INLINE`: its size, first bytes, number of its buffer, place in it."""
INLINE = 12
"""The most bytes of a value that its view holds, after the size."""
MAX_BYTES = 2**31 - 1
"""The most bytes of one value."""
_LIST, _VIEWS = pa.list_(pa.int32()).id, pa.binary_view().id
_IMAGE = pa.binary(VIEW.itemsize)
"""The type that views are moved as: Arrow has no `take` for them yet."""


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type of a column: a scalar for shape "sample", a list of it for ragged ones."""
    scalar = _SCALARS[column.dtype]
    return scalar if column.shape == "sample" else pa.list_(scalar)


def encode(
    columns: dict[str, Column],
    values: dict[str, Any],
    row_ids: Sequence[int],
    allocate: Allocate | None = None,
    *,
    by_turn: bool = False,
) -> tuple[pa.RecordBatch, Facts]:
    """Encode `values`: one Arrow column for each, in the declared type.

    `values`: by column name one value a row: a list, a `[N]` array, or for ragged columns a list of lists or `[T_i]`
    arrays. `columns`: the declared ones, of which `values` are some. `allocate`: for joined ragged columns;
    None: in Arrow's memory. `by_turn`: a row is as old as the oldest token of its newest turn (`turn_tokens`).
    Raises `WrongType`, `WrongLength`, `NotFinite`.
    """
    allocate = _arrow_memory if allocate is None else allocate
    arrays: dict[str, pa.Array] = {}
    for name, given in values.items():
        if len(given) != len(row_ids):
            raise WrongLength(
                f"column {name!r} has {len(given)} values for {len(row_ids)} rows. Give one value for every row."
            )
        arrays[name] = _encode_column(columns[name], given, row_ids, allocate)
    lengths = {name: _lengths(array) for name, array in arrays.items() if columns[name].shape != "sample"}
    token_columns = [name for name in arrays if columns[name].shape == "token"]
    _check_token_lengths({name: lengths[name] for name in token_columns}, row_ids)
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    token_column = token_columns[0] if token_columns else ""
    counted = ("response_ids", "prompt_ids", "context_ids", token_column)
    tokens = {name: lengths[name].tolist() for name in counted if name in lengths}
    row_bytes = np.zeros(len(row_ids), dtype=np.int64)
    for name, array in arrays.items():
        row_bytes += _row_bytes(array, lengths.get(name))
    facts = Facts(
        row_bytes=row_bytes.tolist(),
        oldest_version=_oldest(arrays.get("token_versions"), arrays.get("turn_tokens") if by_turn else None),
        response_tokens=tokens.get("response_ids"),
        prompt_tokens=tokens.get("prompt_ids"),
        token_column=token_column,
        token_lengths=tokens.get(token_column),
        context_tokens=tokens.get("context_ids"),
        rewards=arrays["reward"].to_pylist() if "reward" in arrays else None,
    )
    return batch, facts


def check_declared(columns: dict[str, Column], names: Iterable[str], stage: str) -> None:
    """Raise `UnknownColumn` for the first of the names that a stage writes, and no column has."""
    for name in names:
        if name not in columns:
            problem = f"stage {stage!r} writes column {name!r}, which the dataflow lacks"
            raise UnknownColumn(f"{problem}{suggest(name, columns)}")


def check_types(columns: dict[str, Column], types: Iterable[tuple[str, str]], num_came: int, num_rows: int) -> None:
    """Check a batch on the store's side: types, as Arrow prints them, and number of rows, not values. Raises
    `UnknownColumn`, `WrongType`, `WrongLength`."""
    types = list(types)
    if types and num_came != num_rows:
        raise WrongLength(f"a batch of {num_came} rows came for {num_rows} row ids. Write through StoreClient.")
    for name, kind in types:
        if name not in columns:
            raise UnknownColumn(f"column {name!r} came, which the dataflow lacks{suggest(name, columns)}")
        if ARROW_TYPES.get(kind) != arrow_type(columns[name]):
            raise WrongType(f"column {name!r} came as {kind}; the schema says {arrow_type(columns[name])}.")


def size_of(values: dict[str, Any]) -> int:
    """Bytes of the columns that come as arrays or strings: about what `encode` needs of `allocate`."""
    nbytes = 0
    for given in values.values():
        if len(given) and isinstance(given[0], np.ndarray | str):
            nbytes += sum(map(_nbytes, given))
    return nbytes


def _nbytes(value: Any) -> int:
    if type(value) is np.ndarray:
        return value.nbytes
    return len(value) if isinstance(value, str) else 0


def _arrow_memory(nbytes: int) -> np.ndarray:
    """Memory of Arrow's pool, which has its pages mapped already: a fresh array of megabytes faults on every one."""
    return np.frombuffer(pa.allocate_buffer(nbytes), dtype=np.uint8)


def _encode_column(column: Column, given: Any, row_ids: Sequence[int], allocate: Allocate) -> pa.Array:
    ragged = column.shape != "sample"
    if ragged and set(map(type, given)) <= {np.ndarray}:
        array = _joined(column, given, allocate)
        if array is not None:
            _check_finite(column, array, row_ids)
            return array
    is_plain = set(map(type, given)) <= (_LISTS if ragged else _NUMBERS)
    for row, value in zip(row_ids, given, strict=True) if not is_plain else ():
        if ragged != (isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)):
            raise _misfit(column, row, f"got {_short(value)}", is_list=not ragged)
    try:
        array = ragged_array(column, given) if ragged else _flat(column, given)
    except _MISFIT as error:
        row, problem = _first_misfit(column, given, row_ids) or (row_ids[0], str(error))
        raise _misfit(column, row, problem) from None
    _check_finite(column, array, row_ids)
    return array


def _joined(column: Column, given: Sequence[np.ndarray], allocate: Allocate) -> pa.Array | None:
    """A ragged column from `[T_i]` arrays of its very dtype, with one copy; None if they have another, or shape."""
    dtype = _NUMPY.get(column.dtype)
    if dtype is None or not len(given) or {(value.dtype, value.ndim) for value in given} != {(dtype, 1)}:
        return None
    offsets = _offsets(given)
    count = int(offsets[-1])
    memory = allocate(count * dtype.itemsize)
    values = (_arrow_memory(count * dtype.itemsize) if memory is None else memory).view(dtype)
    np.concatenate(given, out=values)
    kind = arrow_type(column)
    inner = pa.Array.from_buffers(kind.value_type, count, [None, pa.py_buffer(values)])
    return pa.ListArray.from_buffers(kind, len(given), [None, pa.py_buffer(offsets)], children=[inner])


def _offsets(given: Sequence[Any]) -> np.ndarray:
    offsets = np.zeros(len(given) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, given), dtype=np.int64, count=len(given)), out=offsets[1:])
    return offsets


def ragged_array(column: Column, given: Any) -> pa.Array:
    """A ragged column from `[T_i]` arrays or lists."""
    offsets = _offsets(given)
    if len(given) and all(isinstance(value, np.ndarray) for value in given):
        values = np.concatenate(given)
    else:
        values = [item for value in given for item in value]
    return pa.ListArray.from_arrays(pa.array(offsets), _flat(column, values), type=arrow_type(column))


def _flat(column: Column, given: Any) -> pa.Array:
    """Convert values of one column, none of them silently rounded or cut: raises one of `_MISFIT` instead."""
    if column.dtype == "binary":
        return encode_blobs(given)
    if column.dtype == "string":
        array = pa.array(given, type=pa.string())
        if array.null_count:
            raise ValueError("None is no value")
        return array
    values = np.asarray(given)
    if values.size and values.dtype.kind not in _KINDS[column.dtype]:
        raise TypeError(f"got {_short(given)}" if values.dtype.kind == "O" else f"got {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"got an array of shape {values.shape}")
    return pa.array(values, type=_SCALARS[column.dtype]) if values.size else pa.array([], type=_SCALARS[column.dtype])


def _first_misfit(column: Column, given: Any, row_ids: Sequence[int]) -> tuple[int, str] | None:
    """The first row that does not convert on its own, and why; None if each does."""
    for row, value in zip(row_ids, given, strict=True):
        try:
            ragged_array(column, [value]) if column.shape != "sample" else _flat(column, [value])
        except _MISFIT as error:
            return row, f"{error} in {_short(value)}"
    return None


def _misfit(column: Column, row: int, problem: str, *, is_list: bool = False) -> WrongType:
    due = {"sample": "", "list": ", any number", "token": ", one for each response token",
           "prompt": ", one for each prompt token"}[column.shape]  # fmt: skip
    other = f'Column("{column.name}", "{column.dtype}", shape="token")'
    hint = f" Declare {other} for a value of each response token." if is_list else ""
    return WrongType(f"column {column.name!r}, row {row}: {problem}; it must be {column.dtype}{due}.{hint}")


def _check_finite(column: Column, array: pa.Array, row_ids: Sequence[int]) -> None:
    if column.dtype != "float32" or column.nan_ok:
        return
    values = (array.values if pa.types.is_list(array.type) else array).to_numpy(zero_copy_only=False)
    with np.errstate(all="ignore"):
        if np.isfinite(values.sum()):  # one pass and no temporary; a sum that overflows is looked at closely
            return
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return
    position = int(bad[0])
    if pa.types.is_list(array.type):
        position = int(np.searchsorted(array.offsets.to_numpy(), position, side="right")) - 1
    raise NotFinite(
        f"column {column.name!r}, row {row_ids[position]}: {values[bad[0]]} is not finite. Mend what computes it, or "
        "drop the row; "
        f'Column("{column.name}", "{column.dtype}", nan_ok=True) allows it.'
    )


def _check_token_lengths(lengths: dict[str, np.ndarray], row_ids: Sequence[int]) -> None:
    """Check that all token columns of one row have one entry a response token; `response_ids` decides, where it is
    written too. `lengths`: entries of each row, by token column."""
    decider = "response_ids" if "response_ids" in lengths else next(iter(lengths), "")
    for name, found in lengths.items():
        bad = np.flatnonzero(found != lengths[decider])
        if len(bad):
            raise WrongLength(
                f"column {name!r}, row {row_ids[bad[0]]}: {found[bad[0]]} entries, but {decider!r} has "
                f"{lengths[decider][bad[0]]}. Every token column has one entry for each response token."
            )


def _row_bytes(array: pa.Array, lengths: np.ndarray | None) -> "np.ndarray | int":
    """Bytes of each row. `lengths`: entries of a ragged column."""
    if is_blobs(array.type):
        return blob_bytes(array)
    if lengths is not None:
        return lengths.astype(np.int64) * (array.type.value_type.bit_width // 8 or 1) + 4
    if pa.types.is_string(array.type):
        return _lengths(array) + 4
    return array.type.bit_width // 8 or 1


def _lengths(array: pa.Array) -> np.ndarray:
    """Entries of each row of a ragged column, or bytes of strings."""
    offsets = offsets_of(array)
    lengths: np.ndarray = offsets[1:] - offsets[:-1]
    return lengths


def offsets_of(array: pa.Array) -> np.ndarray:
    """Offsets of a ragged column, or of strings: `[N + 1]` int32."""
    buffer = array.buffers()[1]
    offsets = np.frombuffer(buffer, np.int32) if buffer is not None else np.zeros(1, np.int32)
    return offsets[array.offset : array.offset + len(array) + 1]


def _oldest(versions: pa.Array | None, turns: pa.Array | None) -> list[int] | None:
    """The oldest version of each row's tokens, or with `turns`, which has the lengths of its turns, of its newest turn;
    `NO_VERSION` for rows without tokens."""
    if versions is None:
        return None
    lengths, rows = _lengths(versions), np.arange(len(versions))
    if turns is not None:
        lengths, rows = turns.values.to_numpy(), np.repeat(rows, _lengths(turns))
    is_filled = lengths > 0
    oldest = np.full(len(versions), -1, np.int64)
    if is_filled.any():
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        np.maximum.at(oldest, rows[is_filled], np.minimum.reduceat(versions.values.to_numpy(), starts[is_filled]))
    oldest[oldest < 0] = NO_VERSION
    found: list[int] = oldest.tolist()
    return found


def _short(value: Iterable[Any] | Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_blobs(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is that of a column of blobs, ragged or not."""
    return bool((kind.value_type.id if kind.id == _LIST else kind.id) == _VIEWS)


def encode_blobs(values: Sequence[Any]) -> pa.Array:
    """Encode values: bytes, or read-only buffers, which are referred to, or buffers that can be written to, which are
    copied. Equal ones are kept once. Raises `TypeError`, `ValueError`."""
    views = np.zeros(len(values), VIEW)
    images = views.view(np.uint8).reshape(-1, VIEW.itemsize)
    first: dict[bytes, int] = {}
    buffers: list[pa.Buffer] = []
    for number, value in enumerate(values):
        if not isinstance(value, bytes | bytearray | memoryview | pa.Buffer):
            raise TypeError(f"got {type(value).__name__}, where bytes are due")
        buffer = pa.py_buffer(value if memoryview(value).readonly else bytes(value))
        if buffer.size > MAX_BYTES:
            raise ValueError(f"{buffer.size} bytes, and one value has at most {MAX_BYTES}")
        if buffer.size > INLINE:
            same = first.setdefault(xxhash.xxh3_128_digest(buffer), number)
            if same != number and buffer.equals(buffers[views["buffer"][same]]):
                views[number] = views[same]
                continue
            buffers.append(buffer)
            views[number] = buffer.size, bytes(buffer[:4]), len(buffers) - 1, 0
        else:
            views["size"][number] = buffer.size
            images[number, 4 : 4 + buffer.size] = np.frombuffer(buffer, np.uint8)
    return pa.Array.from_buffers(pa.binary_view(), len(values), [None, pa.py_buffer(views), *buffers])


def take_rows(array: pa.Array, positions: pa.Array) -> pa.Array:
    """The values of a column at these positions: what they view is not copied, and the rest is not referred to."""
    if not is_blobs(array.type):
        return array.take(positions)
    views = _values(array)
    moved = pa.Array.from_buffers(_IMAGE, len(views), views.buffers()[:2], offset=views.offset)
    if pa.types.is_list(array.type):
        offsets = array.buffers()[1]
        kind = pa.list_(_IMAGE)
        moved = pa.ListArray.from_buffers(kind, len(array), [None, offsets], offset=array.offset, children=[moved])
    moved = moved.take(positions)
    return compact_blobs(_like(array, moved, _values(moved), views.buffers()[2:]))


def compact_blobs(array: pa.Array) -> pa.Array:
    """The same values without the buffers that they do not name, each buffer once. Blobs are not copied."""
    if not is_blobs(array.type) or not len(_values(array).buffers()) > 2:
        return array
    inner = _values(array)
    if pa.types.is_list(array.type) and (array.offsets[0].as_py(), array.offsets[-1].as_py()) != (0, len(inner)):
        return take_rows(array, pa.array(np.arange(len(array))))  # a part, with values of other rows
    views, buffers = views_of(inner).copy(), inner.buffers()[2:]
    is_long = views["size"] > INLINE
    numbers: dict[int, int] = {}
    kept: list[pa.Buffer] = []
    new = np.zeros(len(buffers), np.int32)
    for old in np.unique(views["buffer"][is_long]).tolist():
        new[old] = numbers.setdefault(buffers[old].address, len(kept))
        if new[old] == len(kept):
            kept.append(buffers[old])
    views["buffer"][is_long] = new[views["buffer"][is_long]]
    moved = pa.Array.from_buffers(_IMAGE, len(views), [None, pa.py_buffer(views)])
    return _like(array, array, moved, kept)


def blobs_of(array: pa.Array) -> list[memoryview]:
    """The values of an array of views, without a copy; equal views are one object."""
    views, buffers = views_of(array), array.buffers()
    memories = [memoryview(buffer) for buffer in buffers[2:]]
    images = memoryview(buffers[1] or b"").cast("B")[array.offset * VIEW.itemsize :]
    found: dict[tuple[int, int, int], memoryview] = {}
    values = []
    for number, (size, _, buffer, offset) in enumerate(views.tolist()):
        if size > INLINE:
            key = buffer, offset, size
            if key not in found:
                found[key] = memories[buffer][offset : offset + size]
            values.append(found[key])
        else:
            start = number * VIEW.itemsize + 4
            values.append(images[start : start + size])
    return values


def views_of(array: pa.Array) -> np.ndarray:
    """The views of an array of them: `[N]` of `VIEW`."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(0, VIEW)
    return np.frombuffer(buffer, VIEW, len(array), array.offset * VIEW.itemsize)


def blob_bytes(array: pa.Array) -> np.ndarray:
    """Bytes of each row, `[N]` int64: a blob counts in the first row that has it."""
    views = views_of(_values(array))
    each = np.full(len(views), VIEW.itemsize, np.int64)
    is_long = np.flatnonzero(views["size"] > INLINE)
    places = (views["buffer"].astype(np.int64) << 32) + views["offset"]
    _, first = np.unique(places[is_long], return_index=True)
    each[is_long[first]] += views["size"][is_long[first]]
    if not pa.types.is_list(array.type):
        return each
    ends = np.concatenate([[0], np.cumsum(each)])[array.offsets.to_numpy()]
    return np.diff(ends) + 4


def _values(array: pa.Array) -> pa.Array:
    return array.values if pa.types.is_list(array.type) else array


def _like(array: pa.Array, rows: pa.Array, views: pa.Array, buffers: Sequence[pa.Buffer]) -> pa.Array:
    """An array of the type of `array`: these views and buffers, and if it is ragged the offsets of `rows`."""
    kind, pieces = pa.binary_view(), [None, views.buffers()[1], *buffers]
    inner = pa.Array.from_buffers(kind, len(views), pieces, offset=views.offset)
    if not pa.types.is_list(array.type):
        return inner
    pieces = [None, rows.buffers()[1]]
    return pa.ListArray.from_buffers(array.type, len(rows), pieces, offset=rows.offset, children=[inner])
