"""Room for the slots of a rank, taken before anything is written. Publications need the same shared memory, and a run
cannot do without them, so copies leave them their room.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from penstock.workers.room import Shortage, reserve
from penstock.workers.trainer.kept.slots import SLOTS, Slots

LEFT_OF_MEMORY = 0.05
"""Share of the machine's memory that copies leave free, besides what they leave to publications."""


def reserve_slots(slots: Slots, num_bytes: int, leave_bytes: int) -> str | None:
    """Reserve all pages of both slots, each of `num_bytes`, if `leave_bytes` are free afterwards. None: they are there;
    else why not and what to do, and nothing of them is left. Raises `OSError` where no file can be made."""
    for directory in (slots.root, slots.directory):  # where the run's own is gone nobody would remove a new one
        directory.mkdir(exist_ok=True)
    with _alone(slots.root):
        short = _reserve(slots, num_bytes, leave_bytes)
    if short is None:
        return None
    slots.remove()
    return (
        f"no room in {slots.root} for the state of rank {slots.rank}: two copies of {num_bytes:,} bytes are needed, "
        f"{short.free_bytes:,} of {short.total_bytes:,} are free, and {leave_bytes:,} of them are left to publications "
        "of the weights. If a rank dies, its trainer goes on from the last checkpoint. To keep its state, enlarge "
        "shared memory (docker: --shm-size; else: mount -o remount,size=… /dev/shm) or the machine's memory; "
        "faults.keep_state=false does without."
    )


def _reserve(slots: Slots, num_bytes: int, leave_bytes: int) -> Shortage | None:
    files = [slots.data(slot) for slot in SLOTS]
    statuses = [file.stat() for file in files if file.exists()]
    missing = len(SLOTS) * num_bytes - sum(status.st_blocks * 512 for status in statuses)
    if missing <= 0 and [status.st_size for status in statuses] == [num_bytes] * len(SLOTS):
        return None
    memory = psutil.virtual_memory()  # shared memory may be said to be larger: who takes the last of it is killed
    if memory.available < missing + leave_bytes + LEFT_OF_MEMORY * memory.total:
        return Shortage(missing, memory.available, memory.total)
    # Each leaves room for those after it.
    leave = [leave_bytes + len(files[number + 1 :]) * num_bytes for number in range(len(files))]
    shortages = (reserve(file, num_bytes, leave_bytes=some) for file, some in zip(files, leave, strict=True))
    return next((short for short in shortages if short is not None), None)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let one process of the node at a time see how much is free, and take it."""
    with (root / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
