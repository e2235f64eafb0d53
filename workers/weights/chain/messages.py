"""The messages between two relays: a header and a small body of plain data each, and chunks' bytes after it.

    downstream ─ Subscribe ─▶ upstream        these chunks of this version, please
    downstream ◀─ Parcel, bytes ─ upstream    some of them, as soon as they are here; a digest for each
    downstream ◀─ Waiting ─ upstream          nothing new
    downstream ◀─ Ended | Gone | Failed       all sent | that version is no longer here | it will never be whole

A connection is one subscription. Bodies end with their checksum: a bit that flips in transit must not turn one chunk's
number into another's.
"""

from collections.abc import Iterable

import msgspec
import xxhash

from penstock.network.connection import Connection, Frame

DIGEST_BYTES = 16
SUM_BYTES = 8


class Subscribe(msgspec.Struct, frozen=True, tag=1):
    number: int
    """Number of the broadcast."""
    plan: bytes
    """Digest of the plan that chunk numbers refer to."""
    source: str
    """The node where the chain begins."""
    wanted: bytes
    """Bits of the wanted chunks; bit i: chunk i."""


class Parcel(msgspec.Struct, frozen=True, tag=2):
    """Announcement of chunks, whose bytes follow in this order."""

    chunks: list[tuple[int, bytes]]
    """Number of each chunk, and xxh3-128 of its bytes as the rank wrote them."""


class Waiting(msgspec.Struct, frozen=True, tag=3):
    source_age_s: float
    """Seconds since the chain's source was heard of."""


class Ended(msgspec.Struct, frozen=True, tag=4):
    pass


class Gone(msgspec.Struct, frozen=True, tag=5):
    pass


class Failed(msgspec.Struct, frozen=True, tag=6):
    reason: str


Message = Subscribe | Parcel | Waiting | Ended | Gone | Failed
KIND = 1
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(connection: Connection, message: Message, num_bytes: int = 0) -> None:
    """Send a message. The caller sends `num_bytes` next."""
    body = msgspec.msgpack.encode(message)
    connection.send(KIND, body + xxhash.xxh3_64_digest(body), num_bytes)


def read(frame: Frame) -> Message:
    """Decode a message. Raises `ConnectionAbortedError` for a damaged one."""
    body, found = frame.body[:-SUM_BYTES], frame.body[-SUM_BYTES:]
    if frame.kind != KIND or xxhash.xxh3_64_digest(body) != found:
        raise ConnectionAbortedError("a message between relays came damaged.")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ConnectionAbortedError(f"a message between relays is none of theirs: {error}.") from None


def to_bits(chunks: Iterable[int], num_chunks: int) -> bytes:
    bits = bytearray((num_chunks + 7) // 8)
    for chunk in chunks:
        bits[chunk // 8] |= 1 << chunk % 8
    return bytes(bits)


def from_bits(bits: bytes, num_chunks: int) -> set[int]:
    return {chunk for chunk in range(min(num_chunks, 8 * len(bits))) if bits[chunk // 8] >> chunk % 8 & 1}
