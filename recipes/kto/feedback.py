"""Responses to sums like those that people give feedback on: one a prompt, about half of them right, and none with a
counterpart."""

import zlib
from typing import Any

from penstock.recipes.dpo.pairs import chosen, rejected


def response(task: dict[str, Any]) -> str:
    """The sum, or a wrong answer; the same for the same problem of the same dataset."""
    is_right = zlib.crc32(f"{task['index']}|{task['prompt']}".encode()) % 2
    return chosen(task) if is_right else rejected(task)
