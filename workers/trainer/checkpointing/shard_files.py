"""A checkpoint's tensors as files: each rank's elements back to back, and an index in JSON that says where they lie.

    rank_0.bin  rank_1.bin  …      bytes of the boxes (`weights/piece.py`), nothing else
    index.json                     name, shape and dtype of each tensor; corner, extents, file and offset of each box

torch's distributed checkpoint (DCP) plans which rank writes and reads what; these classes are the storage under it,
through its public interface. Its own `FileSystemWriter` pickles the index and each tensor: reading them back runs what
their author wrote. Here nothing in the files is run.

`load` reads a trainer's share, whatever the number of ranks that wrote it; `saver.py` writes the files.
"""

import contextlib
import json
import math
from collections.abc import Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.conf.errors import CheckpointError, DamagedCheckpoint, suggest
from penstock.workers.machine.direct_io import DirectReader, DirectWriter
from penstock.workers.machine.files import FarFile, SavedFile, fault_of, is_url, open_file, read_text
from penstock.workers.machine.local_files import write_whole
from penstock.workers.trainer.checkpointing.box_plans import BoxLoadPlanner, values_of
from penstock.workers.trainer.checkpointing.shard_index import Place, index_of, metadata_of
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece, place_of

INDEX = "index.json"
CARRIED = "carried.json"
"""The file of what is no tensor."""


def file_of(rank: int) -> str:
    return f"rank_{rank}.bin"


class ShardWriter(StorageWriter):
    """The writer of one rank in a save."""

    def __init__(self, directory: str | Path, rank: int) -> None:
        self._directory, self._rank = Path(directory), rank
        self.written: list[SavedFile] = []
        """Files with the checksums of what was to be in them."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._directory.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, name = [], file_of(self._rank)
        with contextlib.closing(DirectWriter(self._directory / name)) as file:
            for item in plan.items:
                values = planner.resolve_data(item)
                assert isinstance(values, Tensor)
                assert item.index.offset is not None
                place = Place(tuple(item.index.offset), tuple(values.shape), name, file.num_bytes)
                results.append(WriteResult(item.index, values.nbytes, place))
                file.write(_bytes_of(values))
            file.finish()
        self.written.append(SavedFile(name, file.num_bytes, file.checksum))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, last: called on one rank."""
        self.write_text(INDEX, json.dumps(index_of(metadata, (result for part in results for result in part))))

    def write_text(self, name: str, text: str) -> None:
        write_whole(self._directory / name, text, synced=True)
        self.written.append(SavedFile.of_bytes(name, text.encode()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return not is_url(str(checkpoint_id))


class ShardReader(StorageReader):
    """Reads what is asked for. `read_metadata` raises `DamagedCheckpoint` for an index that `ShardWriter` does not
    write."""

    def __init__(self, directory: str, shapes: dict[str, tuple[int, ...]]) -> None:
        """`directory`: may be an fsspec URL. `shapes`: of the tensors by name; the first format has none."""
        self._directory = directory
        self._shapes = shapes
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            try:
                self._metadata = metadata_of(json.loads(read_text(f"{self._directory}/{INDEX}")), self._shapes)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise DamagedCheckpoint(
                    f"{self._directory}/{INDEX} cannot be read ({type(error).__name__}: {error}). Resume from another "
                    "checkpoint."
                ) from None
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = [(self._place(item), item) for item in plan.items]
        items.sort(key=lambda entry: (entry[0].file, entry[0].offset, entry[1].storage_offsets[0]))
        for name, of_file in groupby(items, key=lambda entry: entry[0].file):
            with open_file(f"{self._directory}/{name}") as file:
                for place, item in of_file:
                    target = planner.resolve_tensor(item)
                    target.copy_(self._read(file, place, item))
                    planner.commit_tensor(item, target)
        return _done(None)

    def _place(self, item: ReadItem) -> Place:
        place: Place = self.read_metadata().storage_data[item.storage_index]
        return place

    def _read(self, file: DirectReader | FarFile, place: Place, item: ReadItem) -> Tensor:
        """The part of a saved box that an item asks for. Where it has not all columns, those between are read, too."""
        tensor = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        start = place_of(tuple(item.storage_offsets), place.extents)
        last = [offset + length - 1 for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
        values = torch.empty(place_of(tuple(last), place.extents) + 1 - start, dtype=tensor.properties.dtype)
        file.read_into(place.offset + start * values.itemsize, _bytes_of(values))
        strides = [math.prod(place.extents[dim + 1 :]) for dim in range(len(place.extents))]
        return values.as_strided(tuple(item.lengths), strides)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return not is_url(str(checkpoint_id))


@torch.no_grad()
def load(pieces: Iterable[Piece], directory: str, ranks: Ranks, optional: Collection[str] = ()) -> set[str]:
    """Overwrite the pieces' values with those of a checkpoint, however many ranks wrote it. Collective.

    `optional`: names that the checkpoint may lack. Returns the names that were found. Raises `CheckpointError` for a
    checkpoint of another architecture, before anything is overwritten, and for files that cannot be read.
    """
    pieces = list(pieces)
    reader = ShardReader(directory, {piece.name: piece.shape for piece in pieces})
    saved = reader.read_metadata().state_dict_metadata
    wanted = [piece for piece in pieces if piece.name in saved or piece.name not in optional]
    for piece in wanted:
        _check_fits(piece, saved, directory)
    try:
        planner = BoxLoadPlanner(wanted)
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


def check_files(directory: str, files: Iterable[SavedFile]) -> None:
    """Raise `DamagedCheckpoint` for the first file of a directory or URL that is not what was written."""
    for file in files:
        if fault := fault_of(directory, file):
            raise DamagedCheckpoint(f"{directory}/{file.name} {fault}. Resume from the checkpoint before it.")


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    assert values.is_contiguous()
    return values.detach().flatten().view(torch.uint8).numpy().data


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _check_fits(piece: Piece, saved: dict[str, Any], directory: str) -> None:
    found = saved.get(piece.name)
    if found is None:
        raise CheckpointError(
            f"{directory} has no {piece.name!r}{suggest(piece.name, saved)} It is of another model or algorithm: "
            "resume with the configuration that wrote it."
        )
    if found.size != torch.Size(piece.shape):
        raise CheckpointError(
            f"{directory}: {piece.name!r} is of shape {list(found.size)}, and this model's is of {list(piece.shape)}. "
            "It is of another architecture: set model.path to the model that was trained."
        )
