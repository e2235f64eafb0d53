"""Writes the samples of some steps for people to read.

Columns are those that the store has of the batch, and those that the trainer's ranks know of it alone
(`workers/trainer/token_recorder.py`), one value a token: `trainer_logprobs`, `loss_mask`, and `advantage` where tokens
differ in it. Pictures are kept beside the samples, which name them (`run_directory/picture_folder.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pyarrow as pa

from penstock.algorithms.graph.columns import PROMPT_PICTURES, SEEN_PICTURES, STANDARD_COLUMNS
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.ray_calls import Kind, answer, kind_of, outcomes
from penstock.orchestrator.observability.reporting.step_log import QUICK_S
from penstock.orchestrator.run_directory.picture_folder import COLUMN, FOLDER, PictureFolder
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.data.rows import Rows
from penstock.workers.trainer.step_report import TokenValues

COLUMNS = (
    "task", "prompt_ids", "response_ids", "response_text", "finish_reason", "reward", "advantage", "token_versions",
    "behavior_logprobs",
    "transcript", "turn_tokens", "turn_rewards", "turn_ids", "policy",
)  # fmt: skip
OF_RANKS = {
    "trainer_logprobs": pa.list_(pa.float32()),
    "loss_mask": pa.list_(pa.bool_()),
    "advantage": pa.list_(pa.float32()),
}
"""Columns of `TokenValues`, with their types."""


def own_columns(flow: Dataflow) -> list[str]:
    """Names of the columns with one value a sample that the dataflow adds to the standard ones, such as `reward_brief`
    of several rewards."""
    stored = flow.stored_columns.items()
    return [
        name
        for name, column in stored
        if name not in STANDARD_COLUMNS and column.shape == "sample" and column.dtype != "binary"
    ]


class SampleLog:
    """Lifecycle: `is_due` before a step, `write` after it, before the next one is trained; `flush` before a checkpoint
    and at the end.

    The rows are fetched at once: the store has them until the next step is trained. A thread encodes and writes them,
    one step's at a time, while the controller goes on.
    """

    def __init__(
        self,
        config: RunConfig,
        flow: Dataflow,
        directory: RunDirectory,
        last_batch: Callable[[list[str]], Awaitable[Rows]],
        ranks: Callable[[], Sequence[tuple[str, Any]]],
    ) -> None:
        """`last_batch`: returns columns of the rows that were trained last. `ranks`: returns the trainer's, with their
        handles."""
        self._every, self._last = config.tracking.samples_every_steps, config.trainer.max_steps
        self._columns = [name for name in COLUMNS if name in flow.stored_columns] + own_columns(flow)
        self._pictures_of = next(
            (name for name in (SEEN_PICTURES[0], PROMPT_PICTURES[0]) if name in flow.stored_columns), None
        )
        """Column with the pictures; None: the run has none."""
        most_bytes = config.tracking.pictures_gib * 2**30
        self._pictures = PictureFolder(directory.path / FOLDER, most_bytes, directory.failed_writes)
        self._directory, self._last_batch, self._ranks = directory, last_batch, ranks
        self._writing: asyncio.Future[None] | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a step's samples are written, so that its ranks record what they know of each token."""
        return bool(self._every) and ((step - 1) % self._every == 0 or step == self._last)

    async def write(self, step: int, num_rows: int) -> None:
        """Write the samples, if they are due and all rows that were trained can still be had. Returns once those of
        earlier steps are written."""
        if not self.is_due(step):
            return
        columns = list(self._columns)
        if self._pictures_of is not None and not self._pictures.is_full:
            columns.append(self._pictures_of)
        call, phase = self._last_batch(columns), f"samples of step {step}"
        rows = await answer(call, name="Store", phase=phase, timeout_s=QUICK_S)
        if len(rows) == num_rows:
            values = await self._token_values(step)
            await self.flush()
            # No task, which could be cancelled before it begins: what was fetched is written however the run ends.
            self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, step, rows, values)
        else:
            reason = f"{num_rows - len(rows)} of {num_rows} rows were with a store or a node that was lost"
            self._directory.event("samples_lost", step=step, reason=reason)

    async def flush(self) -> None:
        """Wait until what was given to `write` is in the directory, or told to be lost."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await asyncio.shield(writing)

    def _write(self, step: int, rows: Rows, values: Sequence[TokenValues]) -> None:
        table = with_token_values(rows, values)
        if (column := self._pictures_of) is not None and column in rows:
            was_full = self._pictures.is_full
            names = self._pictures.keep(rows.blobs(column), distinct=column in SEEN_PICTURES)
            table = table.drop_columns([column]).append_column(COLUMN, pa.array(names, pa.list_(pa.string())))
            if self._pictures.is_full and not was_full:
                reason = "all that are kept would be larger than tracking.pictures_gib"
                self._directory.event("pictures_left_out", step=step, reason=reason)
        self._directory.write_samples(step, table)

    async def _token_values(self, step: int) -> list[TokenValues]:
        """Token values of the ranks that are there and have made this step: one that was replaced since knows nothing
        of it."""
        calls = [(name, handle.token_values.remote(step)) for name, handle in self._ranks()]
        found = await outcomes(calls, phase=f"token values of step {step}", timeout_s=QUICK_S)
        for error in found:
            if isinstance(error, Exception) and kind_of(error) is Kind.ERROR:
                raise error
        return [values for values in found if isinstance(values, TokenValues)]


def with_token_values(rows: Rows, of_ranks: Sequence[TokenValues]) -> pa.Table:
    """The rows' table with its ids and the columns that ranks know, null for a row that none of them knows. Columns of
    which nothing is known are left out."""
    table = rows.table_with_ids()
    for name, kind in OF_RANKS.items():
        known = {
            row: values
            for rank in of_ranks
            for row, values in zip(rank.row_ids.tolist(), getattr(rank, name), strict=True)
        }
        values = [known.get(row) for row in rows.row_ids.tolist()]
        if name not in table.column_names and any(one is not None for one in values):
            table = table.append_column(name, pa.array(values, kind, from_pandas=True))  # NaN is null
    return table
