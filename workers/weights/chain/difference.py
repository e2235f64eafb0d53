"""The difference of a chunk to the same chunk of an earlier version, in bytes to be sent. Pure.

    base      7 7  7 7  7 7  7 7      words of 16 bits, whatever the dtype, in pairs
    chunk     7 7  7 8  7 7  6 7      two pairs have changed
    gaps           1         1        pairs that stay, before each that changes
    changes        0 2       1 0      zigzag of 0, +1, -1, 0: what bfloat16 does at small learning rates

Gaps and changes go through zstd, each kind of byte apart. Pairs are found in half of the time that words are, and take
a tenth more bytes. Both sides work on as many pairs at a time as fit into a core's cache: memory is slower.
"""

import struct

import numpy as np
import pyarrow as pa

PAIR_BYTES = 4
MOST_CHANGED = 0.5
"""Share of changed pairs from which no difference is made: it would hardly be shorter than the chunk."""
LONG = 255
"""Gap that says: the next one of the long gaps follows."""
HEADER = struct.Struct("<II")
"""Number of changed pairs, and of long gaps."""
BLOCK_PAIRS = 2**18
"""Pairs compared at a time."""
CHANGED_PAIRS = 2**14
"""Changed pairs put into their places at a time."""
_codec = pa.Codec("zstd", compression_level=1)


def difference(base: memoryview, chunk: memoryview) -> bytes | None:
    """Make the difference of a chunk to its base, which has the same size. None: it would not be shorter."""
    if len(chunk) % PAIR_BYTES:
        return None
    before, after = (np.frombuffer(one, np.uint32) for one in (base, chunk))
    gaps, long, low, high = [], [], [], []
    last, count = -1, 0
    for start in range(0, len(after), BLOCK_PAIRS):
        old, new = before[start : start + BLOCK_PAIRS], after[start : start + BLOCK_PAIRS]
        places = np.flatnonzero(old != new)
        count += len(places)
        if count > MOST_CHANGED * (start + len(new)):
            return None
        all_gaps = np.diff(places, prepend=last - start) - 1
        zigzag = _zigzag(new[places].view(np.uint16) - old[places].view(np.uint16))
        gaps.append(np.minimum(all_gaps, LONG).astype(np.uint8))
        long.append(all_gaps[all_gaps >= LONG].astype("<u4"))
        low.append((zigzag & 255).astype(np.uint8))
        high.append((zigzag >> 8).astype(np.uint8))
        last = start + int(places[-1]) if len(places) else last
    body = b"".join(part.tobytes() for parts in (gaps, long, low, high) for part in parts)
    made = HEADER.pack(count, sum(map(len, long))) + (_codec.compress(body, asbytes=True) if body else b"")
    return made if len(made) < len(chunk) else None


def apply(made: bytes | bytearray, base: memoryview, target: memoryview) -> None:
    """Write into `target` what `difference` was made of, from the same base. Raises `ValueError` for bytes that are no
    difference."""
    count, num_long = HEADER.unpack_from(made)
    before, pairs = (np.frombuffer(one, np.uint32) for one in (base, target))
    if max(count, num_long) > len(pairs) or num_long > count:
        raise ValueError(f"a difference of {count} pairs, {num_long} of them after long gaps, to {len(pairs)}.")
    try:
        size = 5 * count + 4 * num_long
        body = _codec.decompress(memoryview(made)[HEADER.size :], size, asbytes=True) if size else b""
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a difference that cannot be read: {error}") from None
    gaps, long = np.frombuffer(body, np.uint8, count), np.frombuffer(body, "<u4", num_long, count)
    low, high = (np.frombuffer(body, np.uint8, 2 * count, 4 * num_long + count * number) for number in (1, 3))
    last, done, num_read = -1, 0, 0
    for start in range(0, count, CHANGED_PAIRS):
        steps = gaps[start : start + CHANGED_PAIRS].astype(np.int64)
        of_long = np.flatnonzero(steps == LONG)
        if num_read + len(of_long) > num_long:
            raise ValueError(f"a difference with more long gaps than {num_long}.")
        steps[of_long] = long[num_read : num_read + len(of_long)]
        num_read += len(of_long)
        places = np.cumsum(steps + 1) + last
        last = int(places[-1])
        if last >= len(pairs):
            raise ValueError(f"a difference that ends at pair {last} of {len(pairs)}.")
        pairs[done : last + 1] = before[done : last + 1]
        words = slice(2 * start, 2 * (start + CHANGED_PAIRS))
        moved = before[places]
        moved.view(np.uint16)[:] += _changes(low[words].astype(np.uint16) | (high[words].astype(np.uint16) << 8))
        pairs[places] = moved
        done = last + 1
    if num_read != num_long:
        raise ValueError(f"a difference with {num_read} long gaps of {num_long}.")
    pairs[done:] = before[done:]


def _zigzag(changes: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, … as 0, 1, 2, 3, …, uint16: changes in either direction are small numbers."""
    signed = changes.view(np.int16)
    return ((signed << 1) ^ (signed >> 15)).view(np.uint16)


def _changes(zigzag: np.ndarray) -> np.ndarray:
    return (zigzag >> 1) ^ (-(zigzag & 1).astype(np.int16)).view(np.uint16)
