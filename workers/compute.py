"""The compute role: calls pure functions of columns (advantages and the like) on whole units, and writes their results.

`Compute` is the actor `Compute-<stage>`. Its worker's `run` ends when the store closes. `apply` is the same without a
store, for what the trainers compute per batch (`workers/trainer/preparation.py`), for the imperative API and for
reference loops.
"""

import asyncio
import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage, name_of
from penstock.conf.errors import DataflowError, LeaseExpired
from penstock.store.client.lease import Lease
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.workers.runtime.serving import COMPUTING, Phases, Progress, ServingActor

TORCH_DTYPES = {
    "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "bool": torch.bool
}  # fmt: skip


class ComputeWorker:
    """Runs one compute stage until the store is closed.

    worker = ComputeWorker(flow.stage("group_advantage"), flow.columns)
    worker.apply(Rows.from_lists({"reward": [1.0, 0.0]}, group_ids=[0, 0]))   # {"advantage": [0.7, -0.7]}
    """

    def __init__(
        self,
        stage: Stage,
        columns: dict[str, Column],
        *,
        name: str = "compute-0",
        max_units: int = 64,
        phases: Phases | None = None,
    ) -> None:
        """`columns`: those of the dataflow, by name. `phases`: where it notes its phase."""
        self.stage, self.columns, self.name, self.max_units = stage, columns, name, max_units
        self._phases = phases or Phases()
        self.state = stage.state
        """The state of a function that carries one from batch to batch."""
        self.num_units = 0
        self.num_rows = self.num_in_flight = 0
        """Numbers of rows: in leases that were computed, and in the present one."""
        self.busy_s = 0.0
        self._takes_group_ids = "group_ids" in inspect.signature(stage.function).parameters if stage.function else False

    async def run(self, store: StoreClient) -> None:
        """Lease, compute, write, until the store closes. The function runs in a thread of its own, always the same one:
        the event loop answers calls meanwhile. Raises `DataflowError` if the function returns what the stage does not
        declare, and what the function itself raises."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        try:
            await self._serve(store, thread)
        finally:
            thread.shutdown(wait=False)

    async def _serve(self, store: StoreClient, thread: ThreadPoolExecutor) -> None:
        compute = asyncio.get_running_loop().run_in_executor
        async with store.leases(self.stage.name, self.max_units, self.name) as leases:
            async for lease in leases:
                self.num_in_flight = len(lease.rows)
                started = time.perf_counter()
                with self._phases.within(COMPUTING):
                    results = await compute(thread, self.apply, lease.rows)
                self.busy_s += time.perf_counter() - started
                with suppress(LeaseExpired):  # the rows are somebody else's by now
                    await self._finish(store, lease, results)
                self.num_rows += self.num_in_flight
                self.num_in_flight = 0

    async def _finish(self, store: StoreClient, lease: Lease, results: dict[str, list[Any]]) -> None:
        """Write the results, and drop what a filter does not keep."""
        row_ids = [int(row) for row in lease.rows.row_ids]
        if self.stage.kind == "filter":
            verdicts = results[self.stage.writes[0].name]
            lost = [row for row, kept in zip(row_ids, verdicts, strict=True) if not kept]
            row_ids = [row for row, kept in zip(row_ids, verdicts, strict=True) if kept]
            results = {self.stage.writes[0].name: [True] * len(row_ids)}
            if lost:
                await store.drop(lease, lost, self.stage.reason)
        if row_ids:
            await store.write(lease, row_ids, results)

    def stats(self) -> dict[str, float]:
        return {"units": self.num_units, "busy_s": self.busy_s}

    def apply(self, rows: Rows) -> dict[str, list[Any]]:
        """Compute the columns that the stage writes, a value for each row: a number, or an array `[T_i]` for token
        columns."""
        results: dict[str, list[Any]] = {column.name: [None] * len(rows) for column in self.stage.writes}
        inputs = {name: rows.tensors(name) for name in self.stage.reads}
        if self._takes_group_ids:
            inputs["group_ids"] = torch.from_numpy(rows.group_ids.copy())
        for positions in self._units(rows):
            keywords = {name: _taken(values, positions) for name, values in inputs.items()}
            for column, values in zip(self.stage.writes, self._call(keywords, len(positions)), strict=True):
                for position, value in zip(positions, values, strict=True):
                    results[column.name][position] = value
            self.num_units += 1
        return results

    def _units(self, rows: Rows) -> list[list[int]]:
        if self.stage.unit == "batch":
            return [list(range(len(rows)))]
        if self.stage.unit == "group":
            return [positions.tolist() for _, positions in rows.groups()]
        return [[position] for position in range(len(rows))]

    def _call(self, keywords: dict[str, Any], num_rows: int) -> list[list[Any]]:
        assert self.stage.function is not None
        with torch.no_grad():
            if self.state is None:
                returned = self.stage.function(**keywords)
            else:
                returned, self.state = self._carried(self.stage.function(**keywords, state=self.state))
        writes = self.stage.writes
        if self.stage.kind == "filter" and isinstance(returned, bool):
            returned = torch.full((num_rows,), returned)
        values = (returned,) if len(writes) == 1 and not isinstance(returned, tuple) else returned
        if not isinstance(values, tuple) or len(values) != len(writes):
            names = ", ".join(column.name for column in writes)
            due = f"{len(writes)} value(s) in a tuple ({names})"
            raise self._error(f"returned {_described(returned)}; {due} are due.")
        return [self._checked(column, value, num_rows, keywords) for column, value in zip(writes, values, strict=True)]

    def _carried(self, returned: Any) -> tuple[Any, Any]:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise self._error(f"returned {_described(returned)}; (result, state of the next batch) is due.")
        return returned

    def _checked(self, column: Column, value: Any, num_rows: int, keywords: dict[str, Any]) -> list[Any]:
        if column.shape != "sample":
            return self._checked_tokens(column, value, num_rows, keywords)
        if column.dtype == "string":
            are_strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
            if not are_strings or len(value) != num_rows:
                due = f"a list of {num_rows} strings is due."
                raise self._error(f"returned {_described(value)} for {column.name!r}; {due}")
            return value
        array = self._array(column, value, f"a tensor of shape [{num_rows}]", num_rows)
        return list(array.tolist())

    def _checked_tokens(self, column: Column, value: Any, num_rows: int, keywords: dict[str, Any]) -> list[np.ndarray]:
        if not isinstance(value, list | tuple) or len(value) != num_rows:
            raise self._error(
                f"returned {_described(value)} for {column.name!r}; a list of {num_rows} tensors [T_i] is due."
            )
        alike = (name for name in self.stage.reads if self.columns[name].shape == column.shape != "list")
        known = next((keywords[name] for name in alike), None)
        arrays = []
        for index, item in enumerate(value):
            length = len(known[index]) if known is not None else None
            due = f"for row {index} a tensor of shape [{'T_i' if length is None else length}]"
            arrays.append(self._array(column, item, due, length))
        return arrays

    def _array(self, column: Column, value: Any, due: str, length: int | None) -> np.ndarray:
        """Convert to a 1-dimensional array of the column's dtype, finite unless the column allows otherwise."""
        try:
            tensor = torch.as_tensor(value).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise self._error(f"returned {_described(value)} for {column.name!r}; {due} is due.") from None
        if tensor.dim() != 1 or (length is not None and len(tensor) != length):
            raise self._error(f"returned {_described(value)} for {column.name!r}; {due} is due.")
        if tensor.is_complex() or (tensor.is_floating_point() and column.dtype != "float32"):
            raise self._error(f"returned {tensor.dtype} for {column.name!r}, which is {column.dtype}.")
        tensor = tensor.to(TORCH_DTYPES[column.dtype])
        if column.dtype == "float32" and not column.nan_ok and not bool(torch.isfinite(tensor).all()):
            raise self._error(
                f"returned {tensor.tolist()[:8]} for {column.name!r}: not finite. Mend the function, or declare the "
                "column with nan_ok=True."
            )
        return np.asarray(tensor.numpy())

    def _error(self, text: str) -> DataflowError:
        return DataflowError(f"stage {self.stage.name!r}: {name_of(self.stage.function, 'its function')} {text}")


def _taken(values: Any, positions: list[int]) -> Any:
    if isinstance(values, torch.Tensor):
        first, last = positions[0], positions[-1] + 1
        return values[first:last] if last - first == len(positions) else values[torch.tensor(positions)]
    return [values[position] for position in positions]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r:.60}"


class Compute(ServingActor):
    """Lifecycle: that of every `ServingActor`."""

    def __init__(self, name: str, stage: Stage, columns: dict[str, Column]) -> None:
        """`columns`: every column of the dataflow, by name."""
        super().__init__(name)
        self._worker = ComputeWorker(stage, columns, name=name, phases=self._phases)

    async def progress(self) -> Progress:
        """Rows computed, and those that it holds. May be called at any time."""
        return self._phases.progress(self._worker.num_rows, self._worker.num_in_flight)
