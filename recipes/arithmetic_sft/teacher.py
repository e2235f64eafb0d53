"""A teacher that knows all answers but is shy: where an addition needs a carry it mostly shrugs.

A model trained on such demonstrations can do more than it dares: it has seen enough carries to add them, but a shrug is
the likeliest first token. That hidden ability is what reinforcement learning then brings out, in `recipe=arithmetic`.
"""

import re
import zlib
from typing import Any

SHRUG = "?"
SHARE_HARD, SHARE_EASY = 0.58, 0.05
"""Shares of problems at which the teacher shrugs, with and without a carry."""


def hesitant(task: dict[str, Any]) -> str:
    """Give the answer, or a shrug. The same problem of the same dataset always gets the same demonstration."""
    first, second = (int(number) for number in re.findall(r"\d+", task["prompt"]))
    share = SHARE_HARD if needs_carry(first, second) else SHARE_EASY
    draw = zlib.crc32(f"{task['prompt']}|{task['index']}".encode()) / 2**32
    return SHRUG if draw < share else str(task["answer"])


def needs_carry(first: int, second: int) -> bool:
    """Return whether adding the two digit by digit carries anywhere."""
    while first and second:
        if first % 10 + second % 10 > 9:
            return True
        first, second = first // 10, second // 10
    return False
