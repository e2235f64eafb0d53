"""Saves one rank's share of a trainer through torch's distributed checkpoint (DCP), while training continues.

    begin ─▶ a thread copies the pieces to the host ─▶ writes them, all ranks together ─▶ reads its files back
                        │
    the next optimizer step waits for this copy, and for nothing else: forward and backward change no weight

Checksums are of what was to be written. Each rank reads its own files back from where they are to stay, behind a URL
too. A file that is not what was written fails the save by its name.

The copy is one buffer as large as the pieces, kept and used again, since fresh memory costs more than the copying:

    CPU   pieces ─▶ buffer                              by one thread: torch's own would take training's cores
    GPU   pieces ─▶ page-locked 64 MiB ─▶ buffer        two of them take turns (`weights/publication/publication.py`)

The buffer itself is not page-locked: torch rounds such memory up to a power of two, which for 33 GB is 64 GiB a rank.
No save begins before the previous one has released the buffer, on every rank. A save that misses its deadline, or whose
result is never asked for, is given up: it stops at the next tensor and removes what it wrote, however late. The files
around it (marker, store, what is kept) are those of `orchestrator/checkpointing/checkpoints.py`.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from penstock.conf.errors import CheckpointError, DeadlineExceeded
from penstock.workers.runtime.local_files import FreeSpace
from penstock.workers.runtime.url_files import SavedFile, file_fault, is_url, remove, upload
from penstock.workers.trainer.checkpointing.shard_files import (
    CARRIED,
    INDEX,
    BoxSavePlanner,
    ShardWriter,
    file_of,
    values_of,
)
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.layout import TensorPlace
from penstock.workers.weights.publication.publication import (
    BUFFER_BYTES,
    DeviceCopies,
    PlacedValues,
    needs_buffers,
    side_stream,
)

LOWEST = 19
"""Niceness of a thread that yields to all others."""
ADVICE = "Make room, lower checkpoint.keep_last, or set checkpoint.directory to a place with more."


class PendingSave:
    """A save of one rank: what it has copied, its result, and whether it is still wanted.

    `result` decides once and for all: either the thread claims it and its files count, or it is cancelled first and
    they are removed.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.copied = threading.Event()
        self.ended = threading.Event()
        """Set once the save's thread has released the copies and its files."""
        self.result: Future[list[SavedFile]] = Future()
        self.result_asked = False
        """True once its result was asked for."""
        self.collectives_matched = False
        """True once all ranks have gone through the same collectives."""

    def give_up(self) -> bool:
        """Give the save up. False: it has ended, and its result is there."""
        given_up = self.result.cancel()
        if given_up:
            self.copied.set()
        return given_up

    def check_wanted(self) -> None:
        if self.result.cancelled():
            raise CheckpointError("it was given up")


class Saver:
    """The writer of one rank. Lifecycle: `begin` after an update, `wait_until_copied` before weights change or go,
    `finish`.

    saver = Saver(ranks, timeout_s=600)
    saver.begin(engine.state(), "checkpoints/global_step_10/trainer")
    ...                          # forward, backward
    saver.wait_until_copied()    # optimizer step
    files = saver.finish()
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self.timeout_s = timeout_s
        self._process_group: dist.ProcessGroup | None = None
        self.copy = HostCopy()
        self._last: PendingSave | None = None
        self.copied_s = 0.0
        """Seconds that the last copy took, most of it beside other work."""
        self.waited_s = 0.0
        """Seconds for which `wait_until_copied` has held up its callers, in all."""

    def begin(self, pieces: Iterable[Piece], directory: str, carried: str = "") -> bool:
        """Start to write. The pieces' values may not change before `wait_until_copied` returns. `directory`: one that
        all ranks see, or an fsspec URL. `carried`: what is no tensor, the same on every rank. Collective.

        False, on every rank alike: an earlier save still holds some rank's copies, and nothing has begun. An earlier
        save whose result was not asked for is given up."""
        if self._last is not None and not self._last.result_asked:
            self._last.give_up()
        is_free, collectives_matched = self._agree(self.is_free(), self._last is None or self._last.collectives_matched)
        if not is_free:
            return False
        if (
            self._process_group is None or not collectives_matched
        ):  # a new one where the last save may have left some unmatched
            self._process_group = self._ranks.group_beside(timedelta(seconds=self.timeout_s))
        save = self._last = PendingSave(directory)
        arguments = save, list(pieces), carried
        threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True).start()
        return True

    def is_free(self, timeout_s: float = 0.0) -> bool:
        """Return whether no save holds this rank's copies; wait for that up to `timeout_s`."""
        return self._last is None or self._last.ended.wait(timeout_s)

    def wait_until_copied(self) -> None:
        """Wait until the last save has copied its pieces. Raises `DeadlineExceeded`."""
        if self._last is None:
            return
        started = time.perf_counter()
        copied = self._last.copied.wait(self.timeout_s)
        self.waited_s += time.perf_counter() - started
        if not copied:
            raise DeadlineExceeded(
                f"checkpoint: rank {self._ranks.rank} did not copy its state within {self.timeout_s:g} s "
                "(checkpoint.timeout_s)."
            )

    def finish(self) -> list[SavedFile]:
        """Wait for what `begin` started; return what this rank wrote (nothing: none was started). A save that does not
        end in time is given up. Raises `CheckpointError`, `DeadlineExceeded`."""
        save = self._last
        if save is None or save.result_asked:
            return []
        save.result_asked = True
        try:
            return save.result.result(self.timeout_s)
        except CancelledError:
            raise CheckpointError(f"{save.directory}: rank {self._ranks.rank} has given it up.") from None
        except FutureTimeout:
            if not save.give_up():
                return save.result.result()
            raise DeadlineExceeded(
                f"checkpoint: rank {self._ranks.rank} did not finish writing within {self.timeout_s:g} s. Raise "
                "checkpoint.timeout_s, or see whether checkpoint.directory answers."
            ) from None

    def _agree(self, *answers: bool) -> list[bool]:
        """Return, for each answer, whether every rank gave True. Collective."""
        if self._ranks.num_ranks == 1:
            return list(answers)
        votes = torch.tensor(answers, dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return [bool(vote) for vote in votes.tolist()]

    def _run(self, save: PendingSave, pieces: list[Piece], carried: str) -> None:
        """Copy and write; the save's thread runs this."""
        failure: CheckpointError | None = None
        written: list[SavedFile] = []
        free = FreeSpace(sum(piece.values.nbytes for piece in pieces))
        try:
            started = time.perf_counter()
            shards = self.copy.take(pieces)
            pieces.clear()  # only the host's copies from here on: the device may be another's
            self.copied_s = time.perf_counter() - started
            save.copied.set()
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)  # of this thread: training comes first
            with local_place(save.directory) as local:
                free.measure(local)
                written = self._write(save, shards, carried, local)
        except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001 - it is for `finish` to tell
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            failure = CheckpointError(
                f"{save.directory}: rank {self._ranks.rank} could not write: {reason[0]}{free.shortage_text(ADVICE)}"
            )
        finally:
            self._end(save, written, failure)

    def _end(self, save: PendingSave, written: list[SavedFile], failure: CheckpointError | None) -> None:
        """Set the save's result, or remove its files if the save is not wanted any more."""
        save.copied.set()
        is_wanted = save.result.set_running_or_notify_cancel()
        if not is_wanted:
            with contextlib.suppress(OSError, CheckpointError):  # the next run sweeps what cannot be removed now
                _remove_files(save.directory, self._ranks.rank)
        save.ended.set()  # before the result: whoever has it may begin the next
        if is_wanted and failure is not None:
            save.result.set_exception(failure)
        elif is_wanted:
            save.result.set_result(written)

    def _write(self, save: PendingSave, shards: list[Piece], carried: str, local: str) -> list[SavedFile]:
        """Write the shards, all ranks together until DCP is done; it fails on all of them or on none."""
        writer = ShardWriter(local, self._ranks.rank)
        try:
            dcp.save(
                values_of(shards),
                storage_writer=writer,
                planner=BoxSavePlanner(shards, save.check_wanted),
                process_group=self._process_group,
                no_dist=self._process_group is None,
            )
            save.collectives_matched = True
        except dcp.CheckpointException:
            save.collectives_matched = True
            raise
        if self._ranks.rank == 0:
            writer.write_text(CARRIED, carried)
        for file in writer.written:
            save.check_wanted()
            if local != save.directory:
                upload(Path(local) / file.name, save.directory)
            if fault := file_fault(save.directory, file, save.check_wanted):
                raise CheckpointError(f"{file.name}, read back from there, {fault}")
        return writer.written


@contextlib.contextmanager
def local_place(directory: str) -> Iterator[str]:
    """The directory where files are written first: the directory itself, or a temporary one if it is a URL."""
    if not is_url(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="penstock-checkpoint-") as folder:
        yield folder


def _remove_files(directory: str, rank: int) -> None:
    """Remove what a rank wrote, and the directories that are empty without it. Rank 0 writes the index and what is no
    tensor as well."""
    for name in (file_of(rank), *((INDEX, CARRIED) if rank == 0 else ())):
        remove(f"{directory}/{name}")
    if is_url(directory):
        return
    with contextlib.suppress(OSError):  # not empty, or gone
        for place in (Path(directory), Path(directory).parent):
            place.rmdir()


ALIGNMENT = 16
"""Divisor of the place of each piece in the buffer, in bytes: any dtype's size divides it."""


class HostCopy:
    """Lifecycle: `take` for each save, once the copy of the one before is not needed any more. Any thread, one at a
    time."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        """The buffer; empty before the first copy."""

    @torch.no_grad()
    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy the pieces, of any device; return them with values in the host's memory, which the next call
        overwrites."""
        num_bytes = num_copy_bytes(pieces)
        if len(self.memory) != num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        copies, start = [], 0
        far: list[tuple[int, Tensor]] = []
        for piece in pieces:
            source = piece.values.detach().view(-1).view(torch.uint8)
            target = self.memory[start : start + len(source)]
            if needs_buffers(source):
                far.append((start, source))
            else:
                np.copyto(target.numpy(), source.numpy())
            copies.append(replace(piece, values=target.view(piece.values.dtype).view(piece.values.shape)))
            start += _room(piece)
        if far:
            self._take_from_device(far)
        return copies

    def _take_from_device(self, far: list[tuple[int, Tensor]]) -> None:
        """Copy `[n]` uint8 each, from the byte of the buffer on that stands with it."""
        place = TensorPlace("state", "uint8", tuple(self.memory.shape), 0)
        through = DeviceCopies(self._write)
        with side_stream(far[0][1].device):
            for start, values in far:
                for some in values.split(BUFFER_BYTES):
                    through.add(place, start, some)
                    start += len(some)
            through.finish()

    def _write(self, parts: Sequence[PlacedValues]) -> None:
        for _, start, values in parts:
            np.copyto(self.memory[start : start + len(values)].numpy(), values.numpy())


def num_copy_bytes(pieces: Iterable[Piece]) -> int:
    """Bytes of the buffer for these pieces."""
    return sum(_room(piece) for piece in pieces)


def _room(piece: Piece) -> int:
    return -(-piece.values.nbytes // ALIGNMENT) * ALIGNMENT
