"""The difference of a chunk to the same chunk of an earlier version, in bytes to be sent. Pure.

    base      7 7 7 7 7 7 7      words of 16 bits, whatever the dtype
    chunk     7 8 7 7 6 7 7      two of them have changed
    gaps        1     2          words that stay, before each that changes
    changes     2     1          zigzag of +1 and -1: what bfloat16 does at small learning rates

Gaps and changes go through zstd, each kind of byte apart.
"""

import struct

import numpy as np
import pyarrow as pa

WORD_BYTES = 2
MOST_CHANGED = 0.25
"""Share of changed words from which no difference is made: it would hardly be shorter than the chunk."""
LONG = 255
"""Gap that says: the next one of the long gaps follows."""
HEADER = struct.Struct("<II")
"""Number of changed words, and of long gaps."""
_codec = pa.Codec("zstd", compression_level=1)


def difference(base: memoryview, chunk: memoryview) -> bytes | None:
    """Make the difference. None: it would not be shorter. Both have the same size."""
    if len(chunk) % WORD_BYTES:
        return None
    before, after = (np.frombuffer(one, np.uint16) for one in (base, chunk))
    has_changed = before != after
    if np.count_nonzero(has_changed) > MOST_CHANGED * len(after):
        return None
    places = np.flatnonzero(has_changed)
    gaps = np.diff(places, prepend=-1) - 1
    long = gaps[gaps >= LONG]
    change = (after[places] - before[places]).view(np.int16)
    zigzag = ((change << 1) ^ (change >> 15)).view(np.uint16)
    body = b"".join(
        part.tobytes()
        for part in (
            np.minimum(gaps, LONG).astype(np.uint8), long.astype("<u4"),
            (zigzag & 255).astype(np.uint8), (zigzag >> 8).astype(np.uint8),
        )
    )  # fmt: skip
    made = HEADER.pack(len(places), len(long)) + (_codec.compress(body, asbytes=True) if body else b"")
    return made if len(made) < len(chunk) else None


def apply(made: bytes | bytearray, base: memoryview, target: memoryview) -> None:
    """Write into `target` what `difference` was made of, from the same base. Raises `ValueError` for bytes that are no
    difference."""
    count, num_long = HEADER.unpack_from(made)
    words = np.frombuffer(target, np.uint16)
    if max(count, num_long) > len(words) or num_long > count:
        raise ValueError(f"a difference of {count} words, {num_long} of them after long gaps, to {len(words)}.")
    np.copyto(words, np.frombuffer(base, np.uint16))
    if not count:
        return
    try:
        body = _codec.decompress(memoryview(made)[HEADER.size :], 3 * count + 4 * num_long, asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a difference that cannot be read: {error}") from None
    gaps = np.frombuffer(body, np.uint8, count).astype(np.int64)
    is_long = gaps == LONG
    if np.count_nonzero(is_long) != num_long:
        raise ValueError(f"a difference with {num_long} long gaps of others.")
    gaps[is_long] = np.frombuffer(body, "<u4", num_long, count)
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= len(words):
        raise ValueError(f"a difference that ends at word {places[-1]} of {len(words)}.")
    low, high = (np.frombuffer(body, np.uint8, count, 4 * num_long + count * number) for number in (1, 2))
    zigzag = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
    words[places] += (zigzag >> 1) ^ (-(zigzag & 1).astype(np.int16)).view(np.uint16)
