"""The one copy of a publication: from a rank's tensor, cast, into the file, summed while it is in the cache.

Several threads call it at once: it does not use torch's own threads, which would synchronize after every block and, on
cores that others use as well, wait for each other longer than they copy.
"""

import numpy as np
import torch
import xxhash
from torch import Tensor

BLOCK_BYTES = 2**19
"""Bytes that are copied, then summed: the bytes read and written fit into the cache of a core, also at four bytes to
two."""
CAST_ELEMENTS = 2**15
"""Largest number of elements that torch casts without its threads, where it has several."""


def copy_and_sum(values: Tensor, target: memoryview, dtype: str) -> str:
    """Write `values` (`[num_elements]`, any device and float dtype) as `dtype` into `target`; return the xxh3-128 of
    the bytes written, hexadecimal.
    """
    destination = torch.frombuffer(target, dtype=getattr(torch, dtype))
    if values.device.type != "cpu":  # one transfer: each of them costs a round trip
        destination.copy_(values)
        return xxhash.xxh3_128_hexdigest(target)
    digest = xxhash.xxh3_128()
    step = BLOCK_BYTES // destination.itemsize
    for start, source, block in zip(
        range(0, len(values), step), values.split(step), destination.split(step), strict=True
    ):
        _copy(source, block)
        digest.update(target[start * destination.itemsize : (start + step) * destination.itemsize])
    return digest.hexdigest()


def _copy(source: Tensor, block: Tensor) -> None:
    if source.dtype == block.dtype and source.is_contiguous():
        np.copyto(block.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
        return
    step = len(source) if torch.get_num_threads() == 1 else CAST_ELEMENTS
    for some, there in zip(source.split(step), block.split(step), strict=True):
        there.copy_(some)
