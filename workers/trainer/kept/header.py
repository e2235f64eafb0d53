"""The header of a kept copy: step, rank, contents. Light: agents read it too, and have no torch."""

import msgspec

BLOCK_BYTES = 16 * 2**20
"""Largest number of bytes that one checksum is for."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of the file, and their xxh3-128 (hexadecimal). Blocks follow each other without gaps."""

    num_bytes: int
    checksum: str


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Elements that the rank has of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    first: int
    """Place of the first element here, in the flattened full tensor."""
    num_elements: int
    ranges: str
    """Hash (xxh3-64) of first element and length of each of its ranges: a rank may have many."""


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
    parts: tuple[Part, ...]
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
