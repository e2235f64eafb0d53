"""What a reward process may say to its pool: short JSON, checked before it is believed.

The process runs a user's code on a model's text, so nothing that it says is unpickled, and no message is read that is
longer than `MAX_BYTES`. Written by `child.py`, read by `process.py`. (The pool's own messages are pickled: what comes
from there is trusted, and a function must travel.)

    ["ready", order] or ["refused", text]                                     once
    ["score", index, number] or ["error", index, kind, text] …, ["done"]      for each batch
"""

import json
import math
import struct
from collections.abc import Container
from typing import Any

from penstock.workers.reward.outcome import KINDS, Result, RewardError, bounded

LENGTH = struct.Struct("<Q")
"""Before each message, in either direction."""
MAX_BYTES = 64 * 1024
"""Of a message: several times what the longest text takes."""
MAX_REFUSAL = 4_000
"""Characters that say why a function cannot be loaded."""
ORDERS = ("sequential", "together")


class BadMessageError(ValueError):
    """A message that no reward process of Penstock sends."""


def packed(*message: Any) -> bytes:
    payload = json.dumps(message).encode()
    return LENGTH.pack(len(payload)) + payload


def packed_result(index: int, result: Result) -> bytes:
    if isinstance(result, RewardError):
        return packed("error", index, result.kind, result.text)
    return packed("score", index, result)


def packed_refusal(text: str) -> bytes:
    return packed("refused", bounded(text, MAX_REFUSAL))


def length_of(header: bytes) -> int:
    """Raises `BadMessageError`."""
    (length,) = LENGTH.unpack(header)
    if length > MAX_BYTES:
        raise BadMessageError(f"announced a message of {length:,} bytes; at most {MAX_BYTES:,} are taken")
    return int(length)


def answer_of(payload: bytes) -> tuple[str, str]:
    """("ready", order) or ("refused", text). Raises `BadMessageError`."""
    match _parsed(payload):
        case ["ready", str(order)] if order in ORDERS:
            return "ready", order
        case ["refused", str(text)]:
            return "refused", bounded(text, MAX_REFUSAL)
    raise _no_message(payload)


def result_of(payload: bytes, due: Container[int]) -> tuple[int, Result] | None:
    """Position and result of a sample that is still due; None: the batch has ended. Raises `BadMessageError`."""
    match _parsed(payload):
        case ["score", int(index), float(score)] if index in due and math.isfinite(score):
            return index, score
        case ["error", int(index), str(kind), str(text)] if index in due and kind in KINDS:
            return index, RewardError(kind, text)
        case ["done"]:
            return None
    raise _no_message(payload)


def _parsed(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise _no_message(payload) from None


def _no_message(payload: bytes) -> BadMessageError:
    return BadMessageError(f"sent {payload!r:.80}, which is none of its messages or not due")
