"""A checkpoint's tensors as files: each rank's elements back to back, and an index in JSON that says where they lie.

    rank_0.bin  rank_1.bin  …      bytes of the ranges, nothing else
    index.json                     name, size and dtype of each tensor; file, offset and elements of each range

torch's distributed checkpoint (DCP) plans which rank writes and reads what; these classes are the storage under it,
through its public interface. Its own `FileSystemWriter` pickles the index and each tensor: reading them back runs what
their author wrote. Here nothing in the files is run.

`load` reads a trainer's share, whatever the number of ranks that wrote it; `saver.py` writes the files.
"""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.conf.errors import CheckpointError, DamagedCheckpoint, suggest
from penstock.network.names import checked
from penstock.workers.direct_io import DirectReader, DirectWriter
from penstock.workers.files import FarFile, SavedFile, fault_of, is_url, open_file, read_text
from penstock.workers.local_files import write_whole
from penstock.workers.trainer.checkpointing.flat_shards import FlatLoadPlanner, values_of
from penstock.workers.trainer.checkpointing.plain_data import TENSORS
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece

INDEX = "index.json"
CARRIED = "carried.json"
"""The file of what is no tensor."""
FORMAT = 1


@dataclass(frozen=True)
class Place:
    """The place of a range of a tensor. `first`, `length` in elements of the tensor, `offset` in bytes of the file."""

    first: int
    length: int
    file: str
    offset: int


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
                place = Place(item.index.offset[0], values.numel(), name, file.num_bytes)
                results.append(WriteResult(item.index, values.nbytes, place))
                file.write(_bytes_of(values))
            file.finish()
        self.written.append(SavedFile(name, file.num_bytes, file.checksum))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, last: called on one rank."""
        tensors: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"size": tensor.size.numel(), "dtype": dtype, "ranges": []}
        for result in (result for part in results for result in part):
            tensors[result.index.fqn]["ranges"].append(asdict(result.storage_data))
        self.write_text(INDEX, json.dumps({"format": FORMAT, "tensors": tensors}))

    def write_text(self, name: str, text: str) -> None:
        write_whole(self._directory / name, text, synced=True)
        self.written.append(SavedFile.of_bytes(name, text.encode()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return not is_url(str(checkpoint_id))


class ShardReader(StorageReader):
    """Reads what is asked for and no more. `directory`: may be an fsspec URL. `read_metadata` raises
    `DamagedCheckpoint` for an index that `ShardWriter` does not write."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            try:
                self._metadata = _metadata_of(json.loads(read_text(f"{self._directory}/{INDEX}")))
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
        tensor = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        values = torch.empty(item.lengths[0], dtype=tensor.properties.dtype)
        file.read_into(place.offset + item.storage_offsets[0] * values.itemsize, _bytes_of(values))
        return values

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return not is_url(str(checkpoint_id))


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


def check_files(directory: str, files: Iterable[SavedFile]) -> None:
    """Raise `DamagedCheckpoint` for the first file of a directory or URL that is not what was written."""
    for file in files:
        if fault := fault_of(directory, file):
            raise DamagedCheckpoint(f"{directory}/{file.name} {fault}. Resume from the checkpoint before it.")


def _metadata_of(index: dict[str, Any]) -> Metadata:
    """The metadata of an index. Raises `ValueError`, `KeyError` or `TypeError` for what is no index."""
    if index["format"] != FORMAT:
        raise ValueError(f"its format is {index['format']!r}; this Penstock reads {FORMAT}")
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, entry in index["tensors"].items():
        if entry["dtype"] not in TENSORS:
            raise ValueError(f"{name!r} is of {entry['dtype']!r}")
        ranges = list(_places(name, entry["size"], entry["ranges"]))
        chunks = [ChunkStorageMetadata(torch.Size([place.first]), torch.Size([place.length])) for place in ranges]
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size([entry["size"]]), chunks)
        places |= {MetadataIndex(name, chunk.offsets): place for chunk, place in zip(chunks, ranges, strict=True)}
    return Metadata(tensors, storage_data=places)


def _places(name: str, size: int, ranges: list[dict[str, Any]]) -> Iterator[Place]:
    """Ranges in order of their elements. They must cover the tensor: elements left out would silently keep their old
    values."""
    end = 0
    for place in sorted((Place(**entry) for entry in ranges), key=lambda place: place.first):
        numbers = place.first, place.length, place.offset
        if any(type(number) is not int or number < 0 for number in numbers) or not place.length:
            raise ValueError(f"{name!r} has a range at {numbers}")
        if place.first != end:
            raise ValueError(f"{name!r} has a range from element {place.first} on after one that ends at {end}")
        checked(place.file)
        end = place.first + place.length
        yield place
    if end != size:
        raise ValueError(f"{name!r} has {size} elements, {end} of them in files")


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
    wanted = torch.Size(piece.shape).numel()
    if found.size != torch.Size([wanted]):
        raise CheckpointError(
            f"{directory}: {piece.name!r} has {found.size.numel():,} elements, and this model's has {wanted:,} "
            f"(shape {list(piece.shape)}). It is of another architecture: set model.path to the model that was trained."
        )
