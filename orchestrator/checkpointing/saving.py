"""Takes checkpoints of a run while it goes on. Called by `controller.py` at step boundaries.

    begin(N):  store.cut ─▶ prompts' place ─▶ trainers begin (they copy while the next batch is sampled)
                  │ all of one moment: no update is under way
    meanwhile: store.snapshot, trainers finish ─▶ manifest, marker ─▶ older ones go

One at a time: a second waits for the first. One that fails is told and counted, what there is of it is removed (it may
be what filled the disk), and the run goes on, since its last good checkpoint is still there; only the last of a run
must not fail.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.conf.errors import CheckpointError, PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpointing.checkpoints import Checkpoint, Checkpoints
from penstock.orchestrator.failures import cause_of
from penstock.orchestrator.fleet import Fleet
from penstock.orchestrator.reporting.progress import Progress
from penstock.orchestrator.run_directory import RunDirectory
from penstock.orchestrator.waiting import answer, answers
from penstock.store.client import StoreClient
from penstock.workers.files import is_url
from penstock.workers.prompts.source import PromptStart


class CheckpointWriter:
    """Lifecycle: `begin` at any number of step boundaries, `finish` at the end."""

    def __init__(
        self, fleet: Fleet, store: StoreClient, config: RunConfig, directory: RunDirectory, progress: Progress
    ) -> None:
        self._fleet, self._store, self._config = fleet, store, config
        self._directory, self._progress = directory, progress
        self._checkpoints = Checkpoints(checkpoint_place(config, directory), config.checkpoint)
        self._writing: asyncio.Task[PenstockError | None] | None = None
        self._newest: int | None = None
        """Step of the last that was begun."""
        self.failed = 0
        """Checkpoints that could not be written."""

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """`is_last`: the run ends with this step, before the steps that were asked for."""
        every = self._config.checkpoint.every_steps
        if not every or step == self._newest:
            return False
        return is_last or step % every == 0 or step == self._config.trainer.max_steps

    async def begin(self, step: int) -> float:
        """Take the state of now, after update `step`; what it cost in seconds. Raises `DeadlineExceeded`,
        `WorkerDied`."""
        started = time.monotonic()
        await self.finish()
        self._newest = step
        place = self._checkpoints.directory(step)
        await asyncio.to_thread(self._checkpoints.clear, step)
        admitted = await self._in_time(self._store.cut(), "Store", step)
        name, prompts = self._fleet.role("prompts")[0]
        start: PromptStart = await self._in_time(prompts.start_after.remote(admitted), name, step)
        checkpoint = Checkpoint(
            place, step, start, self._fleet.model_path, dict(self._config.model.paths), config=asdict(self._config),
            head="scores" if self._fleet.flow.of_kind("train")[0].is_scored else "policy",
        )  # fmt: skip
        calls = [(name, handle.begin_saving.remote(checkpoint.trainer)) for name, handle in self._fleet.role("trainer")]
        await answers(calls, phase=_phase(step), timeout_s=self._config.checkpoint.timeout_s)
        self._writing = asyncio.create_task(self._write_or_say(checkpoint))
        return time.monotonic() - started

    async def finish(self, *, strict: bool = False) -> None:
        """Wait for the one that is being written. `strict`: raise what it failed with."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        error = await writing
        if strict and error is not None:
            raise error

    async def _write_or_say(self, checkpoint: Checkpoint) -> PenstockError | None:
        """What it failed with, told and counted."""
        try:
            await self._write(checkpoint)
            return None
        except OSError as error:
            failure: PenstockError = CheckpointError(f"{checkpoint.directory}: cannot be written: {error}")
        except PenstockError as error:
            failure = error
        self.failed += 1
        with contextlib.suppress(OSError, CheckpointError):  # the next run sweeps what cannot be removed now
            await asyncio.to_thread(self._checkpoints.clear, checkpoint.step)
        self._directory.event("checkpoint_failed", error=type(failure).__name__, message=str(failure))
        self._progress.note(f"a checkpoint could not be written, the one before stays: {failure}")
        return failure

    async def _write(self, checkpoint: Checkpoint) -> None:
        step, started = checkpoint.step, time.time()
        calls = [
            self._in_time(handle.finish_saving.remote(), name, step) for name, handle in self._fleet.role("trainer")
        ]
        with _store_place(checkpoint) as root:
            *saved, _ = await _all_ended(*calls, self._in_time(self._store.snapshot(root, step, keep=1), "Store", step))
            if root != checkpoint.store:
                await asyncio.to_thread(self._checkpoints.add_directory, step, "store", Path(root))
        checkpoint.files.extend(file for files in saved for file in files)
        await asyncio.to_thread(self._checkpoints.seal, checkpoint)
        removed = await asyncio.to_thread(self._checkpoints.prune)
        num_bytes = sum(file.num_bytes for file in checkpoint.files)
        self._directory.event("checkpoint", step=step, path=checkpoint.directory, bytes=num_bytes, removed=removed)
        self._directory.timeline.span("checkpoint", "write", started, time.time(), step=step)

    async def _in_time(self, call: Awaitable[Any], name: str, step: int) -> Any:
        return await answer(call, name=name, phase=_phase(step), timeout_s=self._config.checkpoint.timeout_s)


async def _all_ended(*calls: Awaitable[Any]) -> list[Any]:
    """Their results. Raises the error that explains the others, once none of them writes any longer."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    if failures := [result for result in results if isinstance(result, BaseException)]:
        raise cause_of(failures)
    return results


def checkpoint_place(config: RunConfig, directory: RunDirectory) -> str:
    """Where a run's checkpoints are."""
    place = config.checkpoint.directory
    if place is None:
        return str(directory.checkpoints)
    return place if is_url(place) else str(Path(place).expanduser().resolve())


@contextlib.contextmanager
def _store_place(checkpoint: Checkpoint) -> Iterator[str]:
    """Where the store writes: the checkpoint itself, or a directory beside it if that is a URL."""
    if not is_url(checkpoint.directory):
        yield checkpoint.store
        return
    with tempfile.TemporaryDirectory(prefix="penstock-store-") as folder:
        yield folder


def _phase(step: int) -> str:
    return f"checkpoint of step {step}"
