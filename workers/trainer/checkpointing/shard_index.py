"""The index of a checkpoint: where each box of each tensor lies (`shard_files.py`).

    {"format": 2, "tensors": {NAME: {"shape": [4, 6], "dtype": "float32", "boxes": [
        {"corner": [0, 0], "extents": [4, 3], "file": "rank_0.bin", "offset": 0}, …]}}}

What is read was maybe written by others: every number is checked, and boxes must cover each tensor once.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.storage import WriteResult

from penstock.network.names import checked
from penstock.workers.trainer.checkpointing.plain_data import TENSORS
from penstock.workers.weights.piece import Corner, Extents, boxes_of_run

FORMAT = 2
"""Version of the index. The first had the tensors' sizes alone, and ranges of the flattened tensors; it is still read.
"""


@dataclass(frozen=True)
class Place:
    """The place of a box of a tensor. `offset`: in bytes of the file, where its elements lie back to back."""

    corner: Corner
    extents: Extents
    file: str
    offset: int


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
    places: dict[MetadataIndex, Place] = {}
    for name, entry in index["tensors"].items():
        if entry["dtype"] not in TENSORS:
            raise ValueError(f"{name!r} is of {entry['dtype']!r}")
        saved = _places(name, tuple(entry["shape"]), entry["boxes"])
        chunks = [ChunkStorageMetadata(torch.Size(place.corner), torch.Size(place.extents)) for place in saved]
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        places |= {MetadataIndex(name, chunk.offsets): place for chunk, place in zip(chunks, saved, strict=True)}
    return Metadata(tensors, storage_data=places)


def _places(name: str, shape: tuple[int, ...], entries: list[dict[str, Any]]) -> list[Place]:
    """Boxes in order of their corners. They must cover the tensor: elements left out would silently keep their old
    values."""
    places: list[Place] = []
    beside: list[Place] = []
    for entry in sorted(entries, key=lambda entry: entry["corner"]):
        place = Place(tuple(entry["corner"]), tuple(entry["extents"]), checked(entry["file"]), entry["offset"])
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


def _check_inside(name: str, place: Place, shape: tuple[int, ...]) -> None:
    numbers = (*place.corner, *place.extents, place.offset)
    is_whole = all(type(number) is int and number >= 0 for number in (*numbers, *shape)) and all(place.extents)
    is_inside = is_whole and all(end <= extent for end, extent in zip(_end(place), shape, strict=True))
    if not is_inside:
        raise ValueError(f"{name!r} of shape {list(shape)} has a box at {numbers}")


def _end(place: Place) -> Corner:
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
