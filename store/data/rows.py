"""Rows as consumers see them: one entry a sample, columns by name, backed by Arrow without padding.

A lease hands them out (`client/store_client.py`), and engines, rewards and trainers compute on them. Arrays that leave
here are views of Arrow buffers, which may lie in shared memory and are read-only: copy before writing. Imports no Ray,
and torch for `tensors` alone.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.algorithms.graph.columns import STANDARD_COLUMNS
from penstock.conf.errors import StoreError
from penstock.store.data.schema import arrow_type, blobs_of, is_blobs, ragged_array, take_rows
from penstock.store.errors import UnknownColumn, WrongLength


class Rows:
    """An immutable table of samples, ordered by group and then by index in the group.

        rows = Rows.from_lists({"prompt_ids": [[5, 6], [5, 6]], "reward": [1.0, 0.0]}, group_ids=[0, 0])
        rows["reward"]  # array([1., 0.], dtype=float32)
        rows["prompt_ids"][0]  # array([5, 6], dtype=int32)

    A method that returns a table of samples returns a new one.
    """

    def __init__(self, row_ids: np.ndarray, group_ids: np.ndarray, table: pa.Table) -> None:
        """Wrap `table`: N rows, columns of at most one chunk. `row_ids`, `group_ids`: `[N]` int64. Raises
        `WrongLength`."""
        if not len(row_ids) == len(group_ids) == (table.num_rows if table.num_columns else len(row_ids)):
            raise WrongLength(
                f"{len(row_ids)} row ids, {len(group_ids)} group ids and a table of {table.num_rows} rows do not fit "
                "together: give one of each for every row."
            )
        self.row_ids = np.asarray(row_ids, dtype=np.int64)
        self.group_ids = np.asarray(group_ids, dtype=np.int64)
        self._table = table

    @classmethod
    def from_lists(cls, columns: dict[str, list[Any]], group_ids: Sequence[int] | None = None) -> "Rows":
        """Rows numbered from 0. Standard columns get their type, others the one that Arrow infers.

        `group_ids`: one a row; None: every row is a group of its own. Raises `WrongLength` for lists of unequal length.
        """
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise WrongLength(f"columns have unequal numbers of rows: {lengths}. Give one value for every row.")
        count = next(iter(lengths.values()), len(group_ids or ()))
        table = pa.table({name: _array(name, values) for name, values in columns.items()})
        ids = np.arange(count, dtype=np.int64)
        return cls(ids, ids if group_ids is None else np.asarray(group_ids, dtype=np.int64), table)

    @staticmethod
    def concat(parts: "Sequence[Rows]") -> "Rows":
        """All rows of `parts` in their order. All must have the same columns; at least one part. Raises
        `StoreError`."""
        if not parts:
            raise StoreError("Rows.concat got no parts, so their columns are unknown. Pass at least one Rows.")
        names = parts[0].names
        for part in parts:
            if set(part.names) != set(names):
                raise UnknownColumn(
                    f"Rows.concat: parts have columns {list(names)} and {list(part.names)}; select the same ones."
                )
        table = pa.concat_tables([part._table.select(list(names)) for part in parts]).combine_chunks()
        return Rows(
            np.concatenate([part.row_ids for part in parts]), np.concatenate([part.group_ids for part in parts]), table
        )

    @classmethod
    def from_bytes(cls, row_ids: np.ndarray, group_ids: np.ndarray, table: Any) -> "Rows":
        """The rows whose columns `as_bytes` has written, in memory of their own."""
        return cls(row_ids, group_ids, pa.ipc.open_stream(table).read_all().combine_chunks())

    def as_bytes(self) -> bytes:
        """The columns as an Arrow stream, without the ids."""
        return bytes(self._stream())

    def _stream(self) -> pa.Buffer:
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, self._table.schema) as writer:
            writer.write_table(self._table)
        return stream.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the table as an Arrow stream, which knows columns of blobs, as Ray's own way for tables does not."""
        return Rows.from_bytes, (self.row_ids, self.group_ids, self._stream())

    def __len__(self) -> int:
        return len(self.row_ids)

    def __repr__(self) -> str:
        return f"Rows({len(self)} rows of {len(set(self.group_ids.tolist()))} groups: {', '.join(self.names)})"

    def __contains__(self, name: str) -> bool:
        return name in self._table.schema.names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._table.schema.names)

    def __getitem__(self, name: str) -> Any:
        """A column in the form that suits its type: `values`, `strings`, `blobs` or `arrays`. Raises
        `UnknownColumn`."""
        return getattr(self, _accessor(self._column(name).type))(name)

    def values(self, name: str) -> np.ndarray:
        """A numeric sample column: `[N]`, in the column's dtype. Raises `UnknownColumn`, `StoreError` if it is no
        such column.
        """
        array = self._column(name)
        if pa.types.is_list(array.type) or pa.types.is_string(array.type) or is_blobs(array.type):
            raise StoreError(
                f"column {name!r} is {array.type}, not one number a row: use .{_accessor(array.type)}({name!r})."
            )
        return np.asarray(array.to_numpy(zero_copy_only=False))

    def strings(self, name: str) -> list[str]:
        """A string column."""
        array = self._column(name)
        if not pa.types.is_string(array.type):
            raise StoreError(f"column {name!r} is {array.type}, not string: use .{_accessor(array.type)}({name!r}).")
        return list(array.to_pylist())

    def blobs(self, name: str) -> list[Any]:
        """A binary column: for each row a read-only `memoryview`, or a list of them if it is ragged. None is copied:
        rows that share a value share its memory."""
        array = self._column(name)
        if not is_blobs(array.type):
            raise StoreError(f"column {name!r} is {array.type}, not binary: use .{_accessor(array.type)}({name!r}).")
        if not pa.types.is_list(array.type):
            return blobs_of(array)
        values, bounds = blobs_of(array.values), array.offsets.to_pylist()
        return [values[start:end] for start, end in pairwise(bounds)]

    def lists(self, name: str) -> list[list[Any]]:
        """A ragged column as Python lists (copied)."""
        self._ragged_column(name)
        return list(self._column(name).to_pylist())

    def arrays(self, name: str) -> list[np.ndarray]:
        """A ragged column: `[T_i]` for each row, views of one buffer."""
        values, offsets = self.ragged(name)
        bounds = offsets.tolist()
        return [values[start:end] for start, end in pairwise(bounds)]

    def ragged(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A ragged column as `values` `[sum T_i]` and `offsets` `[N + 1]` int64; row i is
        `values[offsets[i]:offsets[i + 1]]`.
        """
        array = self._ragged_column(name)
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        values = array.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        return values, offsets - offsets[0]

    def lengths(self, name: str) -> np.ndarray:
        """Entries of a ragged column for each row: `[N]` int64."""
        return np.diff(self._list_column(name).offsets.to_numpy(zero_copy_only=False)).astype(np.int64)

    def select(self, indices: Sequence[int] | np.ndarray) -> "Rows":
        """The rows at these positions, in this order (copied, but for the values of binary columns)."""
        positions = np.asarray(indices, dtype=np.int64)
        if np.array_equal(positions, np.arange(len(self))):
            return self
        there = pa.array(positions)
        if any(map(is_blobs, self._table.schema.types)):
            table = pa.table({name: take_rows(self._column(name), there) for name in self.names})
        else:
            table = self._table.take(there).combine_chunks()
        return Rows(self.row_ids[positions], self.group_ids[positions], table)

    def with_column(self, name: str, values: Sequence[Any] | np.ndarray) -> "Rows":
        """Return these rows and one more column, or that column replaced: one value a row. Raises `WrongLength`.

        Standard columns get their type, others the one that Arrow infers.
        """
        if len(values) != len(self):
            raise WrongLength(f"column {name!r}: {len(values)} values for {len(self)} rows. Give one for every row.")
        table = self._table.drop_columns([name]) if name in self else self._table
        return Rows(self.row_ids, self.group_ids, table.append_column(name, _array(name, list(values))))

    def without(self, name: str) -> "Rows":
        """Return these rows without a column, if they have it."""
        return Rows(self.row_ids, self.group_ids, self._table.drop_columns([name])) if name in self else self

    def groups(self) -> list[tuple[int, np.ndarray]]:
        """Groups as `(group_id, positions of its rows)`, in order of first appearance."""
        positions: dict[int, list[int]] = {}
        for position, group in enumerate(self.group_ids.tolist()):
            positions.setdefault(group, []).append(position)
        return [(group, np.asarray(where, dtype=np.int64)) for group, where in positions.items()]

    def group_mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of each row's group, `[N]` of `[N]`, over the values that are not NaN; NaN for a group without any.

        rows.group_mean(np.array([1.0, 0.0, np.nan, 4.0]))  # groups 0, 0, 1, 1: array([0.5, 0.5, 4., 4.])
        """
        values = np.asarray(values)
        if values.shape != (len(self),):
            raise WrongLength(f"values of shape {values.shape} for {len(self)} rows. Give one for every row.")
        means = np.full_like(values, np.nan, dtype=np.result_type(values, np.float32))
        for _, where in self.groups():
            known = values[where][~np.isnan(values[where])]
            means[where] = known.mean() if len(known) else np.nan
        return means

    def tensors(self, name: str) -> Any:
        """A column as functions of columns get it (`Dataflow.compute`): one `[N]` tensor of numbers, a list of `[T_i]`
        tensors of a ragged column, a list of strings or blobs. Copied: buffers are shared and read-only."""
        import torch  # late: nothing else here needs it

        found = self[name]
        if isinstance(found, np.ndarray):
            return torch.from_numpy(found.copy())
        return [torch.from_numpy(one.copy()) if isinstance(one, np.ndarray) else one for one in found]

    def per_group(self, function: Callable[..., Any], *names: str) -> np.ndarray:
        """Call a function of columns once for each group, as `Dataflow.compute(per="group")` does, with a keyword for
        each column. Returns a value for each row, `[N]` float32.

        Rows with a number that is not finite, such as the reward that failed, are left out of their group and get NaN.
        Raises `WrongLength` unless there is a value for each of the others.

            rows.per_group(leave_one_out, "reward")
        """
        found, columns = np.full(len(self), np.nan, np.float32), [self[name] for name in names]
        finite = [np.isfinite(values) for values in columns if isinstance(values, np.ndarray)]
        counts = np.logical_and.reduce([np.ones(len(self), bool), *finite])
        for group, where in self.groups():
            if not len(where := where[counts[where]]):
                continue
            part = self.select(where)
            values = np.asarray(function(**{name: part.tensors(name) for name in names}))
            if values.shape != where.shape:
                raise WrongLength(f"group {group}: values of shape {values.shape} for {len(where)} rows.")
            found[where] = values
        return found

    def table(self) -> pa.Table:
        """The columns as an Arrow table, without the ids."""
        return self._table

    def table_with_ids(self) -> pa.Table:
        """The columns as an Arrow table, after `group_id` and `row_id`, int64."""
        ids = {"group_id": self.group_ids, "row_id": self.row_ids}
        table = self._table
        for name in reversed(ids):
            table = table.add_column(0, name, pa.array(ids[name], pa.int64()))
        return table

    def _column(self, name: str) -> pa.Array:
        if name not in self._table.schema.names:
            raise UnknownColumn(
                f"column {name!r} is not among those leased: {', '.join(self.names)}. Add it to the stage's reads."
            )
        column = self._table.column(name)
        if column.num_chunks == 1:
            return column.chunk(0)
        return column.combine_chunks() if column.num_chunks else pa.array([], type=column.type)

    def _list_column(self, name: str) -> pa.Array:
        array = self._column(name)
        if not pa.types.is_list(array.type):
            raise StoreError(f"column {name!r} is {array.type}, not ragged: use .{_accessor(array.type)}({name!r}).")
        return array

    def _ragged_column(self, name: str) -> pa.Array:
        array = self._list_column(name)
        if is_blobs(array.type):
            raise StoreError(f"column {name!r} is {array.type}, not of numbers: use .blobs({name!r}).")
        return array


def _accessor(kind: pa.DataType) -> str:
    if is_blobs(kind):
        return "blobs"
    if pa.types.is_string(kind):
        return "strings"
    return "arrays" if pa.types.is_list(kind) else "values"


def _array(name: str, values: list[Any]) -> pa.Array:
    column = STANDARD_COLUMNS.get(name)
    if column is not None and column.dtype == "binary":
        return ragged_array(column, values)  # which keeps equal values once
    return pa.array(values, type=arrow_type(column) if column else None)
