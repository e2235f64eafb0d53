"""What publications cost, known before a run is started: room in shared memory, from the model's files, and times, by
arithmetic.

    node with engines           two publications, which take turns (`publication_files.py`), and one that is evaluated
    node with ranks alone       of both the bytes that its ranks write; the rest of the file has no pages
    copies that ranks keep      two of weights and both moments, float32 (`trainer/memory_checkpoint.py`)

Seconds of a publication, and of the engine's pause for it (`PublicationTimes`):

    taken     each rank's share cast and copied on its GPU: with max_staleness > 0 a step waits for no more
    written   each rank's share over its GPU's bus into a buffer, and from there into the file, both at once
    brought   to another node by the relays, while it is written
    checked   by the engine, which continues to generate
    paused    the part of each of the engine's GPUs, from the page-locked file; nothing else happens meanwhile

Rates of the processor were measured (docs/performance.md); those of buses are the attainable part of their nominal
rate. None was measured on a GPU. Links between nodes are known where a run has measured them; otherwise a version takes
at least its bytes over their rate.
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
BUSES = {"PCIe 4 x16": 25e9, "PCIe 5 x16": 50e9}
"""Bytes a second in one direction, of 31.5e9 and 63e9 on paper."""
DEVICE_RATE = 1e12
"""Bytes a second that a GPU reads or writes in its memory, at least; assumed."""
MOVED = 3
"""Bytes that are read or written for each byte of a copy: four of float32 are read for two of bfloat16."""
WRITE_RATE = 7.6e9
"""Bytes a second that a thread copies from a buffer into the file and sums."""
RELAY_RATE = 3.2e9
"""Bytes a second that a relay receives, checks and keeps, for each lane and core."""
CHECK_RATE = 6.4e9
"""Bytes a second that a thread reads of a file that was just mapped, and sums."""


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
    except (OSError, ValueError, KeyError, TypeError):  # the code that loads the model reports what is wrong with it
        return None
    return sum(map(math.prod, shapes)) or None


def publication_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of a publication, but for its header. `dtype`: of the engines."""
    return num_elements * DTYPE_BYTES[dtype]


def node_bytes(num_bytes: int, ranks_here: int, num_ranks: int, num_publications: int) -> int:
    """Bytes that a node needs for publications of `num_bytes`. `num_publications`: those that its engines load; 0: it
    has no engines."""
    if num_publications:
        return num_publications * num_bytes
    return TURNS * -(-num_bytes * ranks_here // num_ranks)


def state_copy_bytes(num_trained: int) -> int:
    """Bytes of all ranks' copies of the state of a model with so many trained parameters."""
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
    """The files that transformers would read: some directories have more files, with the same weights."""
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


@dataclass(frozen=True)
class PublicationTimes:
    """Seconds of the phases of a version of `num_bytes`."""

    num_bytes: int
    num_ranks: int
    """Ranks of the trainer, each with a GPU and its bus."""
    gpus_per_engine: int
    threads_per_rank: int = 1
    threads_per_node: int = 8
    """Lanes of a relay, and threads of an engine that checks."""
    link: float | None = None
    """Bytes a second from a node to another, where they were measured; None: no slower than relays."""

    @property
    def taken_s(self) -> float:
        return MOVED * self.num_bytes / self.num_ranks / DEVICE_RATE

    def written_s(self, bus: str) -> float:
        return self.num_bytes / self.num_ranks / min(BUSES[bus], WRITE_RATE * self.threads_per_rank)

    @property
    def brought_s(self) -> float:
        relayed = RELAY_RATE * self.threads_per_node
        return self.num_bytes / (relayed if self.link is None else min(relayed, self.link))

    @property
    def checked_s(self) -> float:
        return self.num_bytes / (CHECK_RATE * self.threads_per_node)

    def paused_s(self, bus: str) -> float:
        return self.num_bytes / self.gpus_per_engine / BUSES[bus]

    def on_one_node_s(self, bus: str) -> float:
        """Seconds from the step's end until an engine pauses, on the ranks' node."""
        return self.written_s(bus) + self.checked_s

    def between_nodes_s(self, bus: str) -> float:
        """The same on another node, where the link is no slower than the relays."""
        return max(self.written_s(bus), self.brought_s) + self.checked_s
