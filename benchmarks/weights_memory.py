"""Extra host memory of a side while it moves weights: private memory of its processes, and what it keeps in /dev/shm.

Shared pages are counted once, by file, whichever process maps them; code and files do not count.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

SAMPLE_S = 0.02


def private_bytes(pids: list[int]) -> int:
    """Anonymous resident memory of the processes, those that have ended left out."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return total


def folder_bytes(folder: Path) -> int:
    """Allocated bytes of all files below."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


def object_store_bytes(raylet: int) -> int:
    """Allocated bytes of Ray's shared memory: files without a name that the raylet holds open."""
    seen = {}
    for link in Path(f"/proc/{raylet}/fd").iterdir():
        try:
            if "/plasma" in os.readlink(link):
                status = link.stat()
                seen[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(seen.values())


class Peak:
    """A watch for the most of a quantity while the block runs, in bytes, above what it was at its start.

    with Peak(lambda: private_bytes(pids)) as peak:
        ...
    print(peak.growth)
    """

    def __init__(self, quantity: Callable[[], int]) -> None:
        self._quantity = quantity
        self._end = threading.Event()

    def __enter__(self) -> "Peak":
        self.first = self.most = self._quantity()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.most = max(self.most, self._quantity())

    @property
    def growth(self) -> int:
        return self.most - self.first

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self.most = max(self.most, self._quantity())
