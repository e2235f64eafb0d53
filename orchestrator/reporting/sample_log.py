"""Some steps' samples, written for people to read. Used by `controller.py`."""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.ray_calls import answer
from penstock.orchestrator.recording.run_directory import RunDirectory
from penstock.orchestrator.reporting.step_log import QUICK_S
from penstock.store.data.rows import Rows

COLUMNS = (
    "task", "prompt_ids", "response_ids", "response_text", "finish_reason", "reward", "advantage", "token_versions",
    "behavior_logprobs",
    "transcript", "turn_tokens", "turn_rewards",
)  # fmt: skip


class SampleLog:
    """Lifecycle: `write` after each step, before the next one is trained, `flush` before a checkpoint and at the end.

    The rows are fetched at once: the store has them until the next step is trained. A thread encodes and writes them,
    one step's at a time, while the controller goes on.
    """

    def __init__(
        self,
        config: RunConfig,
        flow: Dataflow,
        directory: RunDirectory,
        last_batch: Callable[[list[str]], Awaitable[Rows]],
    ) -> None:
        """`last_batch`: columns of the rows that were trained last."""
        self._every, self._last = config.tracking.samples_every_steps, config.trainer.max_steps
        self._columns = [name for name in COLUMNS if name in flow.stored_columns]
        self._directory, self._last_batch = directory, last_batch
        self._writing: asyncio.Future[None] | None = None

    async def write(self, step: int, num_rows: int) -> None:
        """If they are due, and all rows that were trained can still be had. Returns once those of earlier steps are
        written."""
        if not self._every or ((step - 1) % self._every and step != self._last):
            return
        call, phase = self._last_batch(self._columns), f"samples of step {step}"
        rows = await answer(call, name="Store", phase=phase, timeout_s=QUICK_S)
        if len(rows) == num_rows:
            await self.flush()
            # No task, which could be cancelled before it begins: what was fetched is written however the run ends.
            self._writing = asyncio.get_running_loop().run_in_executor(None, self._directory.write_samples, step, rows)
        else:
            reason = f"{num_rows - len(rows)} of {num_rows} rows were with a store or a node that was lost"
            self._directory.event("samples_lost", step=step, reason=reason)

    async def flush(self) -> None:
        """Wait until what was given to `write` is in the directory, or told to be lost."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await asyncio.shield(writing)
