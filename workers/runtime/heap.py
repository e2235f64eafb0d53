"""The C library's heap, of which what is free goes back to the system.

glibc keeps freed memory in pieces of 64 MiB for each thread, and gives them back only from the end. Tensors of ever
other sizes leave most of a piece free, and none of it goes: a rank on a CPU that needs 1 GiB held 7 after 16 steps.
"""

import ctypes
from collections.abc import Callable

import psutil

GROWTH_BYTES, GROWTH = 2**30, 1.5
"""What a process may grow by since its last trim before it trims again: these bytes, and to this multiple. What is
given back costs page faults when it is used again."""


def resident_bytes() -> int:
    """Memory of this process that it shares with no other."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


class Heap:
    """The heap of this process. Lifecycle: `trim` after each step. Does nothing where the C library is none of GNU's.

    heap = Heap()
    heap.trim()
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes) -> None:
        self._resident = resident
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._limit = 0.0

    def trim(self) -> bool:
        """Give free memory back if the process has grown by much since the last time. Returns whether it did. Takes
        some microseconds if not, else some milliseconds a GiB."""
        if self._trim is None or self._resident() <= self._limit:
            return False
        self._trim(0)
        self._limit = max(self._resident() * GROWTH, self._resident() + GROWTH_BYTES)
        return True
