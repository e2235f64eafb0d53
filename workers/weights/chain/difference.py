"""The difference of a chunk to the same chunk of an earlier version, in bytes to be sent. Pure.

    base      7 7 7 7 7 7 7      words of 16 bits, whatever the dtype
    chunk     7 8 7 7 6 7 7      two of them have changed
    gaps        1     2          words that stay, before each that changes
    changes     2     1          zigzag of +1 and -1: what bfloat16 does at small learning rates

Gaps and changes go through zstd, each kind of byte apart. Both sides work on as many words at a time as fit into a
core's cache, in which most of the time goes otherwise.
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
BLOCK_WORDS = 2**19
"""Words compared at a time."""
CHANGED_WORDS = 2**14
"""Changed words put into their places at a time."""
_codec = pa.Codec("zstd", compression_level=1)


def difference(base: memoryview, chunk: memoryview) -> bytes | None:
    """Make the difference. None: it would not be shorter. Both have the same size."""
    if len(chunk) % WORD_BYTES:
        return None
    before, after = (np.frombuffer(one, np.uint16) for one in (base, chunk))
    gaps, long, low, high = [], [], [], []
    last, count = -1, 0
    for start in range(0, len(after), BLOCK_WORDS):
        old, new = before[start : start + BLOCK_WORDS], after[start : start + BLOCK_WORDS]
        has_changed = old != new
        count += np.count_nonzero(has_changed)
        if count > MOST_CHANGED * min(len(after), start + BLOCK_WORDS):
            return None
        places = np.flatnonzero(has_changed)
        all_gaps = np.diff(places, prepend=last - start) - 1
        zigzag = _zigzag(new[places] - old[places])
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
    before, words = (np.frombuffer(one, np.uint16) for one in (base, target))
    if max(count, num_long) > len(words) or num_long > count:
        raise ValueError(f"a difference of {count} words, {num_long} of them after long gaps, to {len(words)}.")
    try:
        size = 3 * count + 4 * num_long
        body = _codec.decompress(memoryview(made)[HEADER.size :], size, asbytes=True) if size else b""
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a difference that cannot be read: {error}") from None
    gaps, long = np.frombuffer(body, np.uint8, count), np.frombuffer(body, "<u4", num_long, count)
    low, high = (np.frombuffer(body, np.uint8, count, 4 * num_long + count * number) for number in (1, 2))
    last, done, num_read = -1, 0, 0
    for start in range(0, count, CHANGED_WORDS):
        some = slice(start, start + CHANGED_WORDS)
        steps = gaps[some].astype(np.int64)
        of_long = np.flatnonzero(steps == LONG)
        if num_read + len(of_long) > num_long:
            raise ValueError(f"a difference with more long gaps than {num_long}.")
        steps[of_long] = long[num_read : num_read + len(of_long)]
        num_read += len(of_long)
        places = np.cumsum(steps + 1) + last
        last = int(places[-1])
        if last >= len(words):
            raise ValueError(f"a difference that ends at word {last} of {len(words)}.")
        words[done : last + 1] = before[done : last + 1]
        words[places] += _changes(low[some].astype(np.uint16) | (high[some].astype(np.uint16) << 8))
        done = last + 1
    if num_read != num_long:
        raise ValueError(f"a difference with {num_read} long gaps of {num_long}.")
    words[done:] = before[done:]


def _zigzag(changes: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2, … as 0, 1, 2, 3, …, uint16: changes in either direction are small numbers."""
    signed = changes.view(np.int16)
    return ((signed << 1) ^ (signed >> 15)).view(np.uint16)


def _changes(zigzag: np.ndarray) -> np.ndarray:
    return (zigzag >> 1) ^ (-(zigzag & 1).astype(np.int16)).view(np.uint16)
