"""The messages of a reward process to its pool: short lines of JSON, checked before they are used.

The process runs a user's code on a model's text, so nothing that it sends is unpickled, and no line is read that is
longer than `MAX_BYTES`. (The pool's own messages are pickled: what comes from there is trusted, and a function must be
sent.)

    ["ready", order] or ["refused", text]                                     once
    ["score", index, number] or ["error", index, kind, text] …, ["done"]      for each batch
"""

import json
import math
from collections.abc import Container
from typing import Any

from penstock.workers.reward.outcome import KINDS, Result, RewardError, bounded

MAX_BYTES = 64 * 1024
"""Largest line, in bytes: several times what the longest text takes."""
MAX_REFUSAL = 4_000
"""Largest number of characters that say why a function cannot be loaded."""
ORDERS = ("sequential", "together")


class BadMessageError(ValueError):
    """The error for a message that no reward process of Penstock sends."""


def packed(*message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def packed_result(index: int, result: Result) -> bytes:
    if isinstance(result, RewardError):
        return packed("error", index, result.kind, result.text)
    return packed("score", index, result)


def packed_refusal(text: str) -> bytes:
    return packed("refused", bounded(text, MAX_REFUSAL))


def answer_of(line: bytes) -> tuple[str, str]:
    """The answer ("ready", order) or ("refused", text). Raises `BadMessageError`."""
    match _parsed(line):
        case ["ready", str(order)] if order in ORDERS:
            return "ready", order
        case ["refused", str(text)]:
            return "refused", bounded(text, MAX_REFUSAL)
    raise _no_message(line)


def result_of(line: bytes, due: Container[int]) -> tuple[int, Result] | None:
    """The position and result of a sample that is still due; None: the batch has ended. Raises `BadMessageError`."""
    match _parsed(line):
        case ["score", int(index), float(score)] if index in due and math.isfinite(score):
            return index, score
        case ["error", int(index), str(kind), str(text)] if index in due and kind in KINDS:
            return index, RewardError(kind, text)
        case ["done"]:
            return None
    raise _no_message(line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise _no_message(line) from None


def _no_message(line: bytes) -> BadMessageError:
    return BadMessageError(f"sent {line!r:.80}, which is none of its messages or not due")
