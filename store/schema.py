"""From a worker's values to Arrow and the numbers that the ledger needs; refuses what the schema forbids.

Called by `store/client.py` on the worker's side, before anything is sent. `encode` is all or nothing: it raises, or
returns a batch that the store takes as it is.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.algorithms.columns import Column
from penstock.store.errors import NotFinite, WrongLength, WrongType
from penstock.store.group import NO_VERSION, Facts

_SCALARS = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "bool": pa.bool_(),
    "string": pa.string(),
}
_KINDS = {"int32": "iu", "int64": "iu", "float32": "fiu", "bool": "b"}
"""numpy's letters for what each dtype takes."""
LARGE = 1 << 16
"""Values of a column that are joined in Arrow's memory."""
_MISFIT = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError, TypeError)


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type of a column: a scalar for shape "sample", a list of it for ragged ones."""
    scalar = _SCALARS[column.dtype]
    return scalar if column.shape == "sample" else pa.list_(scalar)


def encode(columns: dict[str, Column], values: dict[str, Any], row_ids: Sequence[int]) -> tuple[pa.RecordBatch, Facts]:
    """One Arrow column for each of `values`, in the declared type.

    `values`: by column name one value a row: a list, a `[N]` array, or for ragged columns a list of lists or `[T_i]`
    arrays. `columns`: the declared ones, of which `values` are some. Raises `WrongType`, `WrongLength`, `NotFinite`.
    """
    arrays: dict[str, pa.Array] = {}
    for name, given in values.items():
        if len(given) != len(row_ids):
            raise WrongLength(
                f"column {name!r} has {len(given)} values for {len(row_ids)} rows. Give one value for every row."
            )
        arrays[name] = _encode_column(columns[name], given, row_ids)
    _check_token_lengths(columns, arrays, row_ids)
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    return batch, _facts(columns, arrays, len(row_ids))


def check_batch(columns: dict[str, Column], batch: pa.RecordBatch, num_rows: int) -> None:
    """The store's own look at what came: types and number of rows, not values. Raises `WrongType`, `WrongLength`."""
    if batch.num_columns and batch.num_rows != num_rows:
        raise WrongLength(f"a batch of {batch.num_rows} rows came for {num_rows} row ids. Write through StoreClient.")
    for field in batch.schema:
        if field.type != arrow_type(columns[field.name]):
            raise WrongType(
                f"column {field.name!r} came as {field.type}; the schema says {arrow_type(columns[field.name])}."
            )


def _encode_column(column: Column, given: Any, row_ids: Sequence[int]) -> pa.Array:
    ragged = column.shape != "sample"
    for row, value in zip(row_ids, given, strict=True):
        if ragged != (isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)):
            raise _misfit(column, row, f"got {_short(value)}")
    try:
        array = _ragged(column, given) if ragged else _flat(column, given)
    except _MISFIT as error:
        row, problem = _first_misfit(column, given, row_ids) or (row_ids[0], str(error))
        raise _misfit(column, row, problem) from None
    if column.dtype == "float32" and not column.nan_ok:
        _check_finite(column, array, row_ids)
    return array


def _ragged(column: Column, given: Any) -> pa.Array:
    """A ragged column from `[T_i]` arrays or lists, with one copy into one buffer."""
    lengths = np.fromiter((len(value) for value in given), dtype=np.int64, count=len(given))
    offsets = np.zeros(len(given) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    if len(given) and all(isinstance(value, np.ndarray) for value in given):
        if offsets[-1] > LARGE:
            # Into Arrow's pool, which has its pages mapped already: a fresh array of megabytes faults on every one.
            joined = pa.concat_arrays([_flat(column, value) for value in given])
            return pa.ListArray.from_arrays(pa.array(offsets), joined, type=arrow_type(column))
        values = np.concatenate(given)
    else:
        values = [item for value in given for item in value]
    return pa.ListArray.from_arrays(pa.array(offsets), _flat(column, values), type=arrow_type(column))


def _flat(column: Column, given: Any) -> pa.Array:
    """Values of one column, none of them silently rounded or cut: raises one of `_MISFIT` instead."""
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
            _ragged(column, [value]) if column.shape != "sample" else _flat(column, [value])
        except _MISFIT as error:
            return row, f"{error} in {_short(value)}"
    return None


def _misfit(column: Column, row: int, problem: str) -> WrongType:
    one = {"sample": "", "token": ", one for each response token", "prompt": ", one for each prompt token"}[
        column.shape
    ]
    return WrongType(f"column {column.name!r}, row {row}: {problem}; it must be {column.dtype}{one}.")


def _check_finite(column: Column, array: pa.Array, row_ids: Sequence[int]) -> None:
    values = (array.values if pa.types.is_list(array.type) else array).to_numpy(zero_copy_only=False)
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


def _check_token_lengths(columns: dict[str, Column], arrays: dict[str, pa.Array], row_ids: Sequence[int]) -> None:
    """All token columns of one row have one entry a response token; `response_ids` decides, where it is written too."""
    names = [name for name in arrays if columns[name].shape == "token"]
    if len(names) < 2:
        return
    decider = "response_ids" if "response_ids" in names else names[0]
    expected = np.diff(arrays[decider].offsets.to_numpy())
    for name in names:
        lengths = np.diff(arrays[name].offsets.to_numpy())
        bad = np.flatnonzero(lengths != expected)
        if len(bad):
            raise WrongLength(
                f"column {name!r}, row {row_ids[bad[0]]}: {lengths[bad[0]]} entries, but {decider!r} has "
                f"{expected[bad[0]]}. "
                "Every token column has one entry for each response token."
            )


def _facts(columns: dict[str, Column], arrays: dict[str, pa.Array], num_rows: int) -> Facts:
    row_bytes = np.zeros(num_rows, dtype=np.int64)
    for array in arrays.values():
        row_bytes += _row_bytes(array)
    token_column = next((name for name in arrays if columns[name].shape == "token"), "")
    return Facts(
        row_bytes=row_bytes.tolist(),
        oldest_version=_oldest(arrays.get("token_versions")),
        response_tokens=_tokens(arrays, "response_ids"),
        prompt_tokens=_tokens(arrays, "prompt_ids"),
        token_column=token_column,
        token_lengths=_tokens(arrays, token_column),
    )


def _row_bytes(array: pa.Array) -> "np.ndarray | int":
    if pa.types.is_list(array.type):
        return np.diff(array.offsets.to_numpy()).astype(np.int64) * (array.type.value_type.bit_width // 8 or 1) + 4
    if pa.types.is_string(array.type):
        return (
            np.diff(np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]) + 4
        )
    return array.type.bit_width // 8 or 1


def _tokens(arrays: dict[str, pa.Array], name: str) -> list[int] | None:
    if name not in arrays:
        return None
    return [int(length) for length in np.diff(arrays[name].offsets.to_numpy())]


def _oldest(versions: pa.Array | None) -> list[int] | None:
    """The smallest entry of each row; `NO_VERSION` for rows without tokens."""
    if versions is None:
        return None
    offsets = versions.offsets.to_numpy()
    oldest = np.full(len(versions), NO_VERSION, dtype=np.int64)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        oldest[filled] = np.minimum.reduceat(versions.values.to_numpy(), offsets[filled])
    return [int(version) for version in oldest]


def _short(value: Iterable[Any] | Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
