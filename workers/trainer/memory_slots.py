"""The slots of one rank's copies: two files in turn, so that the last step's is whole until the next one's is.

    <root>/rank-3/slot-0         bytes of the rank's pieces, back to back, written over every second step
    <root>/rank-3/slot-0.json    the header: removed before the bytes change, renamed into place when they are whole

    v11 in slot 1, v12 in slot 0  ─▶ begin(13): slot 1's header goes ─▶ bytes ─▶ seal ─▶ v12, v13

So a copy with a header is whole, however its writer died, and the copy before the one that was under way has a header.
The kernel keeps the files when their writer dies; they go with the run's directory, which the node's agent owns.

Room for both is taken before anything is written. Publications need the same shared memory, and a run cannot do without
them, so copies leave them their room. So they do to what each rank of the node copies to the host for a checkpoint.

Light: agents import it too, and have no torch.
"""

import fcntl
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from penstock.workers.runtime.local_files import Shortage, reserve, write_whole

BLOCK_BYTES = 16 * 2**20
"""Largest number of bytes that one checksum is for."""
SLOTS = (0, 1)
LEFT_OF_MEMORY = 0.05
"""Share of the machine's memory that copies leave free, besides what they leave to publications."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of the file, and their xxh3-128 (hexadecimal). Blocks follow each other without gaps."""

    num_bytes: int
    checksum: str


class PieceInfo(msgspec.Struct, frozen=True, array_like=True):
    """Elements that the rank has of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    first: int
    """Place of the first element here, in the flattened full tensor."""
    extents: tuple[int, ...]
    """Extents of the box, or the length of the run (`weights/piece.py`)."""


class Header(msgspec.Struct, frozen=True):
    """Description of one rank's copy after one step."""

    step: int
    rank: int
    num_ranks: int
    lineage: str
    """Id that all ranks that were started together share, and no others. Copies of one step are one state only if
    theirs are equal: a step that was lost may have been made again."""
    num_bytes: int
    leave_bytes: int
    """Bytes that must stay free in the shared memory of a node that takes such copies."""
    parts: tuple[PieceInfo, ...]
    """Parts in the order of the file."""
    blocks: tuple[Block, ...]
    carried: str
    """The states of functions of the dataflow, as text: they are no tensors."""


def to_json(header: Header) -> str:
    return msgspec.json.encode(header).decode()


def from_json(text: bytes) -> Header | None:
    """Decode a header. None for what `to_json` does not write."""
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError:
        return None


class Slots:
    """The slots of one rank. Lifecycle: `reserve_slots` once, then `begin`, write, `seal` for each step. One
    process at a time writes; any may read."""

    def __init__(self, root: str | Path, rank: int) -> None:
        """`root`: the directory of all ranks of a trainer, such as `<the run's directory>/states/policy`."""
        self.root, self.rank = Path(root), rank
        self.directory = self.root / f"rank-{rank}"

    def copies(self) -> dict[int, tuple[int, Header]]:
        """Slot and header of each complete copy, by step. Reads headers alone."""
        found = {}
        for slot in SLOTS:
            header = self._header(slot)
            if header is not None:
                found[header.step] = slot, header
        return found

    def data(self, slot: int) -> Path:
        return self.directory / f"slot-{slot}"

    def begin(self, step: int) -> int:
        """Choose the slot to write the copy of `step` into, and remove its header. Copies of this step and of later
        ones are removed, too: they are of steps that are made again."""
        self.drop(after=step - 1)
        copies = self.copies()
        taken = {slot: other for other, (slot, _) in copies.items()}
        slot = min(SLOTS, key=lambda slot: taken.get(slot, -1))
        self._header_file(slot).unlink(missing_ok=True)
        return slot

    def seal(self, slot: int, header: Header) -> None:
        """Write the header, once all bytes are there."""
        write_whole(self._header_file(slot), to_json(header))

    def drop(self, after: int) -> None:
        """Invalidate copies of later steps."""
        for step, (slot, _) in self.copies().items():
            if step > after:
                self._header_file(slot).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all files of the rank, and give the memory back."""
        for slot in SLOTS:
            self._header_file(slot).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _header_file(self, slot: int) -> Path:
        return self.directory / f"slot-{slot}.json"

    def _header(self, slot: int) -> Header | None:
        try:
            header = from_json(self._header_file(slot).read_bytes())
            size = self.data(slot).stat().st_size
        except FileNotFoundError:
            return None
        return header if header is not None and (header.rank, header.num_bytes) == (self.rank, size) else None


def copied_steps(root: str | Path, rank: int) -> list[int]:
    """Steps whose complete copies this node has of a rank."""
    return sorted(Slots(root, rank).copies())


def copied_ranks(root: str | Path) -> list[int]:
    """Ranks of which this node has had copies."""
    names = (path.name.removeprefix("rank-") for path in Path(root).glob("rank-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def keep_only(root: str | Path, ranks: Collection[int], up_to: int) -> None:
    """Remove copies of other ranks, or of later steps."""
    for rank in copied_ranks(root):
        if rank in ranks:
            Slots(root, rank).drop(after=up_to)
        else:
            Slots(root, rank).remove()


def reserve_slots(slots: Slots, num_bytes: int, leave_bytes: int, save_bytes: int = 0) -> str | None:
    """Reserve all pages of both slots, each of `num_bytes`, if `leave_bytes` of shared memory are free afterwards, and
    memory for the saves of all ranks that have slots here, `save_bytes` each. None: they are there; else why not and
    what to do, and nothing of them is left. Raises `OSError` where no file can be made."""
    for directory in (slots.root, slots.directory):  # where the run's own is gone nobody would remove a new one
        directory.mkdir(exist_ok=True)
    with _alone(slots.root):
        saves = len(copied_ranks(slots.root)) * save_bytes
        short = _reserve(slots, num_bytes, leave_bytes, saves)
    if short is None:
        return None
    slots.remove()
    return (
        f"no room in {slots.root} for the state of rank {slots.rank}: two copies of {num_bytes:,} bytes are needed, "
        f"{short.free_bytes:,} of {short.total_bytes:,} are free, {leave_bytes:,} of them are left to publications of "
        f"the weights, and {saves:,} to checkpoints under way. If a rank dies, its "
        "trainer goes on from the last checkpoint. To keep its state, enlarge "
        "shared memory (docker: --shm-size; else: mount -o remount,size=… /dev/shm) or the machine's memory; "
        "faults.keep_state=false does without."
    )


def _reserve(slots: Slots, num_bytes: int, leave_bytes: int, saves: int) -> Shortage | None:
    files = [slots.data(slot) for slot in SLOTS]
    statuses = [file.stat() for file in files if file.exists()]
    missing = len(SLOTS) * num_bytes - sum(status.st_blocks * 512 for status in statuses)
    memory = psutil.virtual_memory()  # shared memory may be said to be larger: who takes the last of it is killed
    if missing <= 0 and [status.st_size for status in statuses] == [num_bytes] * len(SLOTS):
        wanted = saves + LEFT_OF_MEMORY * memory.total if saves else 0
        return Shortage(0, memory.available, memory.total) if memory.available < wanted else None
    if memory.available < missing + leave_bytes + saves + LEFT_OF_MEMORY * memory.total:
        return Shortage(missing, memory.available, memory.total)
    # Each leaves room for those after it.
    leave = [leave_bytes + len(files[number + 1 :]) * num_bytes for number in range(len(files))]
    shortages = (reserve(file, num_bytes, leave_bytes=some) for file, some in zip(files, leave, strict=True))
    return next((short for short in shortages if short is not None), None)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one process of the node at a time measure what is free, and reserve it."""
    with (root / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
