"""Pairs of responses to a sum: the right one, and one that the warm start would give."""

import re
import zlib
from typing import Any

from penstock.recipes.arithmetic_sft.teacher import SHRUG, needs_carry


def chosen(task: dict[str, Any]) -> str:
    """The sum."""
    return str(task["answer"])


def rejected(task: dict[str, Any]) -> str:
    """A shrug where there is a carry, or else the sum with its last digit changed."""
    first, second = (int(number) for number in re.findall(r"\d+", task["prompt"]))
    answer = str(task["answer"])
    if needs_carry(first, second):
        return SHRUG
    shift = 1 + zlib.crc32(task["prompt"].encode()) % 9
    return answer[:-1] + str((int(answer[-1]) + shift) % 10)
