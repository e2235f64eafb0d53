"""What a kept copy says of itself. Light: agents read it too, and have no torch.

Used by everything in this folder, and by the agents, which bring copies to other nodes (`workers/node/states.py`).
"""

import msgspec

BLOCK_BYTES = 16 * 2**20
"""Most that one checksum is for."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of the file, and their xxh3-128 (hexadecimal). Blocks follow each other without gaps."""

    num_bytes: int
    checksum: str


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What the rank has of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the full tensor."""
    first: int
    """Of its first element here, in the flattened full tensor."""
    num_elements: int
    ranges: str
    """xxh3-64 of first element and length of each of its ranges: a rank may have many."""


class Header(msgspec.Struct, frozen=True):
    """Of one rank's copy after one step."""

    step: int
    rank: int
    num_ranks: int
    lineage: str
    """The same on all ranks that were started together, and of no others. Copies of one step are one state only if
    theirs are equal: a step that was lost may have been made again."""
    num_bytes: int
    leave_bytes: int
    """What must stay free in the shared memory of a node that takes such copies."""
    parts: tuple[Part, ...]
    """In the order of the file."""
    blocks: tuple[Block, ...]
    carried: str
    """What is no tensor: states of functions of the dataflow."""


def to_json(header: Header) -> str:
    return msgspec.json.encode(header).decode()


def from_json(text: bytes) -> Header | None:
    """None for what `to_json` does not write."""
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError:
        return None
