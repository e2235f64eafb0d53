"""A checkpoint's tensors as files: each rank's elements back to back, and an index in JSON that says where they lie.

    rank_0.bin  rank_1.bin  …      bytes of the boxes (`weights/piece.py`), nothing else
    index.json                     {"format": 2, "tensors": {NAME: {"shape": [4, 6], "dtype": "float32", "boxes": [
                                       {"corner": [0, 0], "extents": [4, 3], "file": "rank_0.bin", "offset": 0}, …]}}}

torch's distributed checkpoint (DCP) plans which rank writes and reads what; these classes are the storage under it,
through its public interface. Its own `FileSystemWriter` pickles the index and each tensor: reading them back runs what
their author wrote. Here nothing in the files is run. An index may be somebody else's: every number is checked, and
boxes must cover each tensor once.

Whichever engine sharded a tensor, what a rank has of it is a few boxes of the full tensor. Saved as such, a checkpoint
of R ranks can be read by any other number of ranks, by other splits of a layer and by another engine: DCP finds which
saved boxes overlap those that are asked for. `load` reads a trainer's share; `saver.py` writes the files.
"""

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from penstock.conf.errors import CheckpointError, DamagedCheckpoint, suggest
from penstock.network.names import checked
from penstock.workers.runtime.local_files import DirectReader, DirectWriter, write_whole
from penstock.workers.runtime.url_files import RemoteFile, SavedFile, file_fault, is_url, open_file, read_text
from penstock.workers.trainer.checkpointing.plain_data import TENSORS
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Corner, Extents, Piece, boxes, boxes_of_run, place_of

FORMAT = 2
"""Version of the index. The first had the tensors' sizes alone, and ranges of the flattened tensors; it is still read.
"""
INDEX = "index.json"
CARRIED = "carried.json"
"""The file of what is no tensor."""


@dataclass(frozen=True)
class BoxPlace:
    """The place of a box of a tensor. `offset`: in bytes of the file, where its elements lie back to back."""

    corner: Corner
    extents: Extents
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
                place = BoxPlace(tuple(item.index.offset), tuple(values.shape), name, file.num_bytes)
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

    def _place(self, item: ReadItem) -> BoxPlace:
        place: BoxPlace = self.read_metadata().storage_data[item.storage_index]
        return place

    def _read(self, file: DirectReader | RemoteFile, place: BoxPlace, item: ReadItem) -> Tensor:
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
        if fault := file_fault(directory, file):
            raise DamagedCheckpoint(f"{directory}/{file.name} {fault}. Resume from the checkpoint before it.")


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


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    assert values.is_contiguous()
    return values.detach().flatten().view(torch.uint8).numpy().data


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def index_of(metadata: Metadata, results: Iterable[WriteResult]) -> dict[str, Any]:
    """The index of what was written, `results` of all ranks."""
    tensors: dict[str, Any] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"shape": list(tensor.size), "dtype": dtype, "boxes": []}
    for result in results:
        tensors[result.index.fqn]["boxes"].append(asdict(result.storage_data))
    return {"format": FORMAT, "tensors": tensors}


def metadata_of(index: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Metadata:
    """The metadata of an index. Raises `ValueError`, `KeyError` or `TypeError` for what is no index."""
    if index["format"] == 1:
        index = _with_boxes(index, shapes)
    elif index["format"] != FORMAT:
        raise ValueError(f"its format is {index['format']!r}; this Penstock reads {FORMAT} and 1")
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, BoxPlace] = {}
    for name, entry in index["tensors"].items():
        if entry["dtype"] not in TENSORS:
            raise ValueError(f"{name!r} is of {entry['dtype']!r}")
        saved = _places(name, tuple(entry["shape"]), entry["boxes"])
        chunks = [ChunkStorageMetadata(torch.Size(place.corner), torch.Size(place.extents)) for place in saved]
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        places |= {MetadataIndex(name, chunk.offsets): place for chunk, place in zip(chunks, saved, strict=True)}
    return Metadata(tensors, storage_data=places)


def _places(name: str, shape: tuple[int, ...], entries: list[dict[str, Any]]) -> list[BoxPlace]:
    """Boxes in order of their corners. They must cover the tensor: elements left out would silently keep their old
    values."""
    places: list[BoxPlace] = []
    beside: list[BoxPlace] = []
    for entry in sorted(entries, key=lambda entry: entry["corner"]):
        place = BoxPlace(tuple(entry["corner"]), tuple(entry["extents"]), checked(entry["file"]), entry["offset"])
        _check_inside(name, place, shape)
        beside = [other for other in beside if _end(other)[:1] > place.corner[:1] or not shape]
        for other in beside:
            if all(start < end for start, end in zip(place.corner, _end(other), strict=True)) and all(
                start < end for start, end in zip(other.corner, _end(place), strict=True)
            ):
                raise ValueError(f"{name!r} has boxes at {list(other.corner)} and {list(place.corner)} that overlap")
        beside.append(place)
        places.append(place)
    found = sum(math.prod(place.extents) for place in places)
    if found != math.prod(shape):
        raise ValueError(f"{name!r} has {math.prod(shape)} elements, {found} of them in files")
    return places


def _check_inside(name: str, place: BoxPlace, shape: tuple[int, ...]) -> None:
    numbers = (*place.corner, *place.extents, place.offset)
    is_whole = all(type(number) is int and number >= 0 for number in (*numbers, *shape)) and all(place.extents)
    is_inside = is_whole and all(end <= extent for end, extent in zip(_end(place), shape, strict=True))
    if not is_inside:
        raise ValueError(f"{name!r} of shape {list(shape)} has a box at {numbers}")


def _end(place: BoxPlace) -> Corner:
    """Place behind a box's last element, a number a dim."""
    return tuple(start + extent for start, extent in zip(place.corner, place.extents, strict=True))


def _with_boxes(index: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """An index of the first format as one of this."""
    tensors = {}
    for name, entry in index["tensors"].items():
        shape = shapes.get(name, ())
        if math.prod(shape) != entry["size"]:  # nobody asks for it, or it is refused
            shape = (entry["size"],)
        width = getattr(torch, entry["dtype"]).itemsize if entry["dtype"] in TENSORS else 0
        found = []
        for part in entry["ranges"]:
            first, length, offset = part["first"], part["length"], part["offset"]
            if first < 0 or length <= 0 or first + length > entry["size"]:
                raise ValueError(f"{name!r} of {entry['size']} elements has a range at {(first, length, offset)}")
            for corner, extents in boxes_of_run(shape, first, length):
                found.append({"corner": corner, "extents": extents, "file": part["file"], "offset": offset})
                offset += math.prod(extents) * width
        tensors[name] = {"shape": shape, "dtype": entry["dtype"], "boxes": found}
    return {"format": FORMAT, "tensors": tensors}


class BoxSavePlanner(DefaultSavePlanner):
    """Plans the save of a state dict that has the pieces' names."""

    def __init__(self, pieces: Iterable[Piece], check_wanted: Callable[[], None] = lambda: None) -> None:
        """`check_wanted`: called before each tensor; what it raises ends the save, on all ranks."""
        super().__init__(flatten_state_dict=False)
        self._boxes = by_place(pieces)
        self._check_wanted = check_wanted

    def create_local_plan(self) -> SavePlan:
        self._check_wanted()
        self.plan = SavePlan([_write_item(box) for box in self._boxes.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        self._check_wanted()
        return self._boxes[_place(index)].values


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of the pieces. All names must be in the checkpoint, with the right size."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = by_place(pieces)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for box in self._boxes.values():
            chunks.setdefault(box.name, []).append(_chunk(box))
        items = []
        for name, wanted in chunks.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._boxes[_place(index)].values


def by_place(pieces: Iterable[Piece]) -> dict[tuple[str, Corner], Piece]:
    """The pieces' boxes by name and corner: a rank may have several of a tensor."""
    return {(box.name, box.corner): box for box in boxes(pieces)}


def values_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The state dict that DCP gets; the planners know where each element belongs."""
    return {piece.name: piece.values for piece in pieces}


def _place(index: MetadataIndex) -> tuple[str, Corner]:
    assert index.offset is not None
    return index.fqn, tuple(index.offset)


def _chunk(box: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.corner), box.values.shape)


def _write_item(box: Piece) -> WriteItem:
    chunk = _chunk(box)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(box.values), torch.Size(box.shape))
    return WriteItem(MetadataIndex(box.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
