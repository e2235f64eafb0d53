"""Reads a checkpoint's share of a trainer, whatever the number of ranks that wrote it. Nothing in its files is run.

The files are those that `saver.py` wrote.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from penstock.conf.errors import CheckpointError, DamagedCheckpoint, suggest
from penstock.workers.files import SavedFile, fault_of, read_text
from penstock.workers.trainer.checkpointing.flat_shards import FlatLoadPlanner, values_of
from penstock.workers.trainer.checkpointing.saver import CARRIED
from penstock.workers.trainer.checkpointing.shard_files import ShardReader
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece


@torch.no_grad()
def load(pieces: Iterable[Piece], directory: str, ranks: Ranks, optional: Collection[str] = ()) -> set[str]:
    """Overwrite the pieces' values with those of a checkpoint, however many ranks wrote it. Collective.

    `optional`: names that the checkpoint may lack. Returns the names that were found. Raises `CheckpointError` for a
    checkpoint of another architecture, before anything is overwritten, and for files that cannot be read.
    """
    reader = ShardReader(directory)
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
    """Return what `Saver.begin` was given besides tensors. Raises `CheckpointError`."""
    try:
        return read_text(f"{directory}/{CARRIED}")
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
    """Raise `DamagedCheckpoint` for the first file of a directory or URL that is not what was written."""
    for file in files:
        if fault := fault_of(directory, file):
            raise DamagedCheckpoint(f"{directory}/{file.name} {fault}. Resume from the checkpoint before it.")
