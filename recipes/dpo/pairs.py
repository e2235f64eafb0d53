"""Pairs of responses to a sum: the right one, and one that the warm start would give."""

import zlib
from typing import Any

from penstock.recipes.arithmetic_sft.teacher import SHRUG


def chosen(task: dict[str, Any]) -> str:
    """The sum."""
    return str(task["answer"])


def rejected(task: dict[str, Any]) -> str:
    """A shrug, or the sum missed by a little: by one, or by ten as when a carry is forgotten."""
    answer, dice = int(task["answer"]), zlib.crc32(task["prompt"].encode())
    misses = (SHRUG, str(answer + 1), str(abs(answer - 1)), str(answer + 10), str(abs(answer - 10)))
    return misses[dice % len(misses)]
