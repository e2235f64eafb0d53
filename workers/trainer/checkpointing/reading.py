"""Reads a checkpoint's share of a trainer, whatever the number of ranks that wrote it. Nothing in its files is run.

Called by `training_state.py`; what is read is what `saver.py` wrote.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from penstock.conf.errors import CheckpointError, suggest
from penstock.workers.files import SavedFile, download, is_url, saved_file
from penstock.workers.trainer.checkpointing.flat_shards import FlatLoadPlanner, values_of
from penstock.workers.trainer.checkpointing.saver import CARRIED, local_place
from penstock.workers.trainer.checkpointing.shard_files import ShardReader
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece


def load(pieces: Iterable[Piece], directory: str, ranks: Ranks, optional: Collection[str] = ()) -> set[str]:
    """Overwrite the pieces' values with those of a checkpoint, however many ranks wrote it. Collective.

    `optional`: names that it may lack. Returns the names that were found. Raises `CheckpointError` for one of another
    architecture, before anything is overwritten, and for files that cannot be read.
    """
    with local_place(directory) as local:
        if local != directory:
            download(directory, Path(local))
        return _load(list(pieces), local, directory, ranks, optional)


@torch.no_grad()
def _load(pieces: list[Piece], local: str, directory: str, ranks: Ranks, optional: Collection[str]) -> set[str]:
    reader = ShardReader(local)
    saved = reader.read_metadata().state_dict_metadata
    wanted = [piece for piece in pieces if piece.name in saved or piece.name not in optional]
    for piece in wanted:
        _check_fits(piece, saved, directory)
    try:
        planner = FlatLoadPlanner(wanted)
        dcp.load(values_of(wanted), storage_reader=reader, planner=planner, no_dist=ranks.num_ranks == 1)
    except (OSError, RuntimeError, ValueError, EOFError, dcp.CheckpointException) as error:
        raise CheckpointError(f"{directory}: rank {ranks.rank} could not read it: {error}") from None
    return {piece.name for piece in wanted}


def read_carried(directory: str) -> str:
    """What `Saver.begin` was given besides tensors. Raises `CheckpointError`."""
    with local_place(directory) as local:
        if local != directory:
            download(f"{directory}/{CARRIED}", Path(local) / CARRIED)
        try:
            return (Path(local) / CARRIED).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{directory}/{CARRIED}: cannot be read: {error}") from None


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
