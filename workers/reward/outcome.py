"""The outcome of scoring one sample: a finite float, or a `RewardError` that says why there is none.

It is made in the pool's child processes (`child.py`), carried by `pool.py`, counted and reported by `worker.py`.
"""

import math
import traceback
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("raised", "bad_value", "timeout", "crash")
MAX_TEXT = 2_000
"""Largest number of characters of a `RewardError`'s text: enough for a message and a place in a file. It is logged and
shown."""


@dataclass(frozen=True)
class RewardError:
    """The reason why a sample has no reward. A value, not an exception: a batch of results holds some of these."""

    kind: str
    """A kind of `KINDS`: the function raised, returned no finite number, missed its deadline, or ended its process."""
    text: str
    """Text of at most `MAX_TEXT` characters that UTF-8 can write: it may quote a model's text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", bounded(self.text))

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    @classmethod
    def of(cls, error: BaseException) -> "RewardError":
        """Make an error of an exception: its type, message, and the innermost line of the traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
        try:
            message = str(error)
        except Exception as fault:  # noqa: BLE001 - the exception's class is the user's
            message = f"its message raises {type(fault).__name__}"
        return cls("raised", f"{type(error).__name__}: {bounded(message, MAX_TEXT * 3 // 4)}{where}")


Result = float | RewardError


async def in_order(stream: AsyncIterator[tuple[int, Result]], count: int) -> list[Result]:
    """Put results in order that come as they are known, each with its place."""
    results: list[Result] = [RewardError("crash", "not scored")] * count
    async for place, result in stream:
        results[place] = result
    return results


def bounded(text: str, max_characters: int = MAX_TEXT) -> str:
    """The beginning of a text, in characters that UTF-8 can write."""
    more = len(text) - max_characters
    cut = text if more <= 0 else f"{text[: max_characters - 30]}… ({more + 30:,} more)"
    return cut.encode(errors="replace").decode()


def as_score(value: Any) -> Result:
    """Convert a function's value for one sample to a float, or to the error that says why it cannot be one.

    Takes int, float, bool, 0-dimensional arrays and tensors, and mappings with a "score" (verl).
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            return RewardError("bad_value", f'returned a dict without "score"; its keys: {sorted(map(str, value))}.')
        value = value["score"]
    if value is None:
        return RewardError("bad_value", "returned None; a reward is a number.")
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) is not None:
        numel = value.numel() if hasattr(value, "numel") else value.size
        if numel != 1:
            return RewardError(
                "bad_value", f"returned a {type(value).__name__} of {numel} elements; a reward is one number."
            )
        value = item()
    if not isinstance(value, int | float):
        return RewardError("bad_value", f"returned {type(value).__name__} {value!r:.80}; a reward is a number.")
    score = float(value)
    if not math.isfinite(score):
        return RewardError("bad_value", f"returned {score}; a reward is finite.")
    return score
