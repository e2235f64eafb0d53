"""Saves and loads one rank's share of a trainer with torch's distributed checkpoint (DCP), while training goes on.

    begin ─▶ a thread copies the pieces to the host ─▶ writes them, all ranks together ─▶ notes sizes and checksums
                        │
    the next optimizer step waits for this copy, and for nothing else: forward and backward change no weight

Copies are kept and used again, since fresh memory costs more than the copying. Called by `trainer.py` and `actor.py`;
the files around it (marker, store, what is kept) are `orchestrator/checkpointing/checkpoints.py`'s.
"""

import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from penstock.conf.errors import CheckpointError, DeadlineExceeded, suggest
from penstock.workers.files import SavedFile, download, is_url, saved_file, upload
from penstock.workers.trainer.checkpointing.flat_shards import FlatLoadPlanner, FlatSavePlanner
from penstock.workers.trainer.engines.engine import Piece
from penstock.workers.trainer.process_group import ProcessGroup

LOWEST = 19
"""Niceness of a thread that takes what others leave."""
CARRIED = "carried.pickle"
"""The file of what is no tensor."""


class Saver:
    """One rank's writer. Lifecycle: `begin` after an update, `wait_until_copied` before weights change, `finish`.

    saver = Saver(group, timeout_s=600)
    saver.begin(engine.state(), "checkpoints/global_step_10/trainer")
    ...                          # forward, backward
    saver.wait_until_copied()    # optimizer step
    files = saver.finish()
    """

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._ranks: Any = None
        self._copies: dict[tuple[str, int], Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._result: Future[list[SavedFile]] | None = None
        self.copied_s = 0.0
        """What the last copy took, most of it beside other work."""
        self.waited_s = 0.0
        """For how long `wait_until_copied` has held up its callers, in all."""

    def begin(self, pieces: Iterable[Piece], directory: str, carried: bytes = b"") -> None:
        """Start to write. The pieces' values may not change before `wait_until_copied` returns. `directory`: one that
        all ranks see, or an fsspec URL. `carried`: what is no tensor, the same on every rank. Collective."""
        self.finish()
        if self._ranks is None and self._group.num_ranks > 1:
            self._ranks = dist.new_group(backend="gloo")  # collectives of its own, beside the training's
        listed = list(pieces)
        self._copied.clear()
        result: Future[list[SavedFile]] = Future()
        self._result = result
        thread = threading.Thread(
            target=self._save, args=(listed, directory, carried, result), name="checkpoint", daemon=True
        )
        thread.start()

    def wait_until_copied(self) -> None:
        """Raises `DeadlineExceeded`."""
        started = time.perf_counter()
        copied = self._copied.wait(self._timeout_s)
        self.waited_s += time.perf_counter() - started
        if not copied:
            raise DeadlineExceeded(
                f"checkpoint: rank {self._group.rank} did not copy its state within {self._timeout_s:g} s "
                "(checkpoint.timeout_s)."
            )

    def finish(self) -> list[SavedFile]:
        """Wait for what `begin` started; what this rank wrote (nothing: none was started). Raises `CheckpointError`,
        `DeadlineExceeded`."""
        if self._result is None:
            return []
        result, self._result = self._result, None
        try:
            return result.result(self._timeout_s)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"checkpoint: rank {self._group.rank} did not finish writing within {self._timeout_s:g} s. Raise "
                "checkpoint.timeout_s, or see whether checkpoint.directory answers."
            ) from None

    def _save(self, pieces: list[Piece], directory: str, carried: bytes, result: "Future[list[SavedFile]]") -> None:
        free_bytes = None
        try:
            started = time.perf_counter()
            shards = self._copy(pieces)
            self.copied_s = time.perf_counter() - started
            self._copied.set()
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)  # of this thread: training comes first
            with _local(directory) as local:
                free_bytes = _free_bytes(local)
                dcp.save(
                    _values(shards),
                    storage_writer=dcp.FileSystemWriter(local),
                    planner=FlatSavePlanner(shards),
                    process_group=self._ranks,
                    no_dist=self._ranks is None,
                )
                if self._group.rank == 0:
                    (Path(local) / CARRIED).write_bytes(carried)
                written = _written_by(local, self._group.rank)
                if local != directory:
                    for file in written:
                        upload(Path(local) / file.name, directory)
            result.set_result(written)
        except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001 - it is for `finish` to tell
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            room = _too_little(free_bytes, sum(piece.values.nbytes for piece in pieces))
            result.set_exception(
                CheckpointError(f"{directory}: rank {self._group.rank} could not write: {reason[0]}{room}")
            )
        finally:
            self._copied.set()

    @torch.no_grad()
    def _copy(self, pieces: list[Piece]) -> list[Piece]:
        on_gpu = self._group.device.type != "cpu"
        for piece in pieces:
            place = piece.name, piece.first
            copy = self._copies.get(place)
            if copy is None or copy.shape != piece.values.shape:
                copy = self._copies[place] = torch.empty(
                    piece.values.shape, dtype=piece.values.dtype, device="cpu", pin_memory=on_gpu
                )
            copy.copy_(piece.values, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        return [replace(piece, values=self._copies[piece.name, piece.first]) for piece in pieces]


@contextmanager
def _local(directory: str) -> Iterator[str]:
    """Where DCP writes or reads: the directory itself, or one beside it if it is a URL."""
    if not is_url(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="penstock-checkpoint-") as folder:
        yield folder


def _free_bytes(directory: str) -> int:
    """Where a directory is or is to be made."""
    path = Path(directory)
    existing = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    return shutil.disk_usage(existing).free


def _too_little(free_bytes: int | None, needed_bytes: int) -> str:
    """What to say of room where that may be the trouble: other ranks and the store want some of it as well."""
    if free_bytes is None or free_bytes > 2 * needed_bytes:
        return ""
    return (
        f". Its part alone needs {needed_bytes:,} bytes, and {free_bytes:,} were free. Make room, lower "
        "checkpoint.keep_last, or set checkpoint.directory to a place with more."
    )


def load(pieces: Iterable[Piece], directory: str, group: ProcessGroup, optional: Collection[str] = ()) -> set[str]:
    """Overwrite the pieces' values with those of a checkpoint, however many ranks wrote it. Collective.

    `optional`: names that it may lack. Returns the names that were found. Raises `CheckpointError` for one of another
    architecture, before anything is overwritten, and for files that cannot be read.
    """
    with _local(directory) as local:
        if local != directory:
            download(directory, Path(local))
        return _load(list(pieces), local, directory, group, optional)


@torch.no_grad()
def _load(pieces: list[Piece], local: str, directory: str, group: ProcessGroup, optional: Collection[str]) -> set[str]:
    reader = dcp.FileSystemReader(local)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory}: its index cannot be read ({error}). Resume from another one.") from None
    wanted = [piece for piece in pieces if piece.name in saved or piece.name not in optional]
    for piece in wanted:
        _check_fits(piece, saved, directory)
    try:
        planner = FlatLoadPlanner(wanted)
        dcp.load(_values(wanted), storage_reader=reader, planner=planner, no_dist=group.num_ranks == 1)
    except (OSError, RuntimeError, ValueError, EOFError, dcp.CheckpointException) as error:
        raise CheckpointError(f"{directory}: rank {group.rank} could not read it: {error}") from None
    return {piece.name for piece in wanted}


def read_carried(directory: str) -> bytes:
    """What `begin` was given besides tensors. Raises `CheckpointError`."""
    with _local(directory) as local:
        if local != directory:
            download(f"{directory}/{CARRIED}", Path(local) / CARRIED)
        try:
            return (Path(local) / CARRIED).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{directory}/{CARRIED}: cannot be read: {error}") from None


def _values(pieces: list[Piece]) -> dict[str, Any]:
    """What DCP wants to see; the planners know where each element belongs."""
    return {piece.name: piece.values for piece in pieces}


def _check_fits(piece: Piece, saved: dict[str, Any], directory: str) -> None:
    found = saved.get(piece.name)
    if found is None:
        raise CheckpointError(
            f"{directory} has no {piece.name!r}{suggest(piece.name, saved)} It is of another model or algorithm: "
            "resume with the configuration that wrote it."
        )
    wanted = torch.Size(piece.shape).numel()
    if found.size != torch.Size([wanted]):
        raise CheckpointError(
            f"{directory}: {piece.name!r} has {found.size.numel():,} elements, and this model's has {wanted:,} "
            f"(shape {list(piece.shape)}). It is of another architecture: set model.path to the model that was trained."
        )


def _written_by(directory: str, rank: int) -> list[SavedFile]:
    """A rank's files are called `__<rank>_<n>.distcp`; rank 0 writes the index and what is no tensor as well."""
    root = Path(directory)
    files = sorted(root.glob(f"__{rank}_*.distcp"))
    files += [root / ".metadata", root / CARRIED] if rank == 0 else []
    return [saved_file(file) for file in files]


def check_files(directory: str, files: Iterable[SavedFile]) -> None:
    """Raise `CheckpointError` for the first file of a directory that is not what was written. Files behind a URL are
    left to its file system."""
    if is_url(directory):
        return
    for file in files:
        path = Path(directory) / file.name
        found = saved_file(path) if path.is_file() else None
        if found != file:
            problem = "is missing" if found is None else "is damaged: its size or checksum is not what was written"
            raise CheckpointError(f"{path} {problem}. Resume from the checkpoint before it.")
