"""Room in shared memory for the weights: what a run's publications take on each node, known from the model's files
before anything is started.

    node with engines           two publications, which take turns (`reused_files.py`)
    node with ranks alone       of both the bytes that its ranks write; the rest of the file has no pages
    copies that ranks keep      two of weights and both moments, float32 (`trainer/memory_checkpoint/`)
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.workers.weights.publication.layout import DTYPE_BYTES

TURNS = 2
"""Publications that lie side by side."""
COPIES = 2
"""Copies that a rank keeps of its state, by faults.keep_state."""
STATE_BYTES = 12
"""Bytes of a copy for each trained parameter: the weight and AdamW's two moments."""
GIB = 2**30
INDEX_NAME, WHOLE_NAME = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class SharedMemory:
    """The shared memory of a node. `total_bytes` is the size of its file system, which a container limits."""

    total_bytes: int
    free_bytes: int


def stored_elements(model: str | Path) -> int | None:
    """Number of elements of a model's tensors, from the headers of its safetensors; None where there are none. `model`:
    a directory, or the name of one of the Hugging Face hub, which counts if it is in this machine's cache. A weight
    that is tied is stored once, and published once."""
    try:
        shapes = [entry["shape"] for file in _files(_directory(model)) for entry in _entries(file)]
    except (OSError, ValueError, KeyError, TypeError):  # who loads the model says what is wrong with it
        return None
    return sum(map(math.prod, shapes)) or None


def publication_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of a publication, but for its header. `dtype`: of the engines."""
    return num_elements * DTYPE_BYTES[dtype]


def needed_on_node(num_bytes: int, ranks_here: int, num_ranks: int, *, has_engines: bool) -> int:
    """Bytes that a node needs for publications of `num_bytes`."""
    if has_engines:
        return TURNS * num_bytes
    return TURNS * -(-num_bytes * ranks_here // num_ranks)


def kept_bytes(num_trained: int) -> int:
    """Bytes of the copies that all ranks together keep of a model with so many trained parameters."""
    return COPIES * STATE_BYTES * num_trained


def how_to_enlarge(num_bytes: int) -> str:
    """The settings that give a node or container at least so much shared memory, as half a sentence."""
    gib = max(1, math.ceil(num_bytes / GIB))
    return (
        f"enlarge shared memory (docker: --shm-size={gib}g; Kubernetes: an emptyDir with medium: Memory and sizeLimit: "
        f"{gib}Gi, mounted at /dev/shm; else: mount -o remount,size={gib}g /dev/shm)"
    )


def _directory(model: str | Path) -> Path:
    """Raises `OSError` or `ValueError` for one that is not here."""
    here = Path(model).expanduser()
    if here.is_dir():
        return here
    import huggingface_hub  # late: no other part of this layer needs it

    return Path(huggingface_hub.snapshot_download(str(model), local_files_only=True))


def _files(directory: Path) -> list[Path]:
    """The files that transformers would read: some directories have others beside them, with the same weights."""
    index = directory / INDEX_NAME
    if index.is_file():
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (directory / WHOLE_NAME).is_file():
        return [directory / WHOLE_NAME]
    return sorted(directory.glob("*.safetensors"))


def _entries(file: Path) -> Iterator[dict[str, list[int]]]:
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        header = dict(json.loads(source.read(min(length, file.stat().st_size))))
    yield from (entry for name, entry in header.items() if name != "__metadata__")
