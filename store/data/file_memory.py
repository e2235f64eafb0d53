"""Files as memory that keep no file open: thousands of segments are mapped at a time, and a process may have only a
thousand files open.

    array = map_file(descriptor, nbytes)    the descriptor may be closed
    del array, and all views of it          the pages are unmapped

Python's own `mmap` keeps a copy of the descriptor for as long as the mapping is there; from Python 3.13 on it need not
(`trackfd`).
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Pages:
    """The mapping that an array of a file's bytes holds on to."""

    def __init__(self, address: int, nbytes: int, *, is_written: bool) -> None:
        self._range = address, nbytes
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, not is_written),
        }  # fmt: skip

    def __del__(self, unmap: Callable[..., Any] = _LIBC.munmap) -> None:  # bound here: modules end before some arrays
        unmap(*self._range)


def map_file(descriptor: int, nbytes: int | None = None, *, is_written: bool = False) -> np.ndarray:
    """Map the first bytes of an open file, uint8, shared with all processes that have mapped it. `nbytes`: None: all
    that it has. `is_written`: the array can be written to, and its pages are there at once. Raises `OSError`."""
    if nbytes is None:
        nbytes = os.fstat(descriptor).st_size
    protection, flags = mmap.PROT_READ, mmap.MAP_SHARED
    if is_written:
        protection, flags = protection | mmap.PROT_WRITE, flags | mmap.MAP_POPULATE
    address = _LIBC.mmap(None, nbytes, protection, flags, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{nbytes} bytes cannot be mapped: {os.strerror(number)}")
    return np.asarray(_Pages(address, nbytes, is_written=is_written))
