"""The result of scoring one sample: a `RewardValue`, a `RewardError` that says why there is none, or None for a sample
that the function does not count.

`reward_child.py` makes it in a process of the pool, `reward_pool.py` carries it, `reward_worker.py` counts and reports
it. A process reports it to its pool by messages: short lines of JSON, checked before they are used.

    ["ready", order] or ["refused", text]                                     once
    ["score", index, number, accuracy or null], ["none", index] or ["error", index, kind, text] …,
    ["metric", name, number] at any time, ["done"]                            for each batch

The process runs a user's code on a model's text, so nothing that it sends is unpickled, and no line is read that is
longer than `MAX_BYTES`. (The pool's own messages are pickled: what comes from there is trusted, and a function must be
sent.)
"""

import json
import math
import traceback
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

KINDS = ("raised", "bad_value", "timeout", "crash")
MAX_TEXT = 2_000
"""Largest number of characters of a `RewardError`'s text: enough for a message and a place in a file. It is logged and
shown."""
MAX_NAME = 100
"""Largest number of characters of a metric's name."""
MAX_BYTES = 64 * 1024
"""Largest line, in bytes: several times what the longest text takes."""
MAX_REFUSAL = 4_000
"""Largest number of characters that say why a function cannot be loaded."""
ORDERS = ("sequential", "together")


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


class RewardValue(float):
    """A reward, a finite number."""

    accuracy: float | None = None
    """How right the sample is, from 0 to 1, where the function says so: verl's `acc`."""

    @classmethod
    def of(cls, value: float, accuracy: float | None) -> "RewardValue":
        reward = cls(value)
        reward.accuracy = accuracy
        return reward


RewardResult = float | RewardError | None
"""A float is mostly a `RewardValue`; None: the function does not count the sample."""
LoggedValue = tuple[str, float]
"""A metric that a function has logged: its name and a value."""


class ScoringPool:
    """Base of what scores samples: processes with a function (`reward_pool.py`), or an engine (`judge_pool.py`)."""

    num_lanes = 1
    """Number of leases that the pool has work for at a time."""
    replaced = 0
    """Number of processes that were killed or died, and were replaced."""
    logged: Mapping[str, tuple[float, int]] = MappingProxyType({})
    """Sum and number of the values of each metric that the function has logged."""

    @property
    def busy_s(self) -> float:
        """Seconds spent scoring, added up."""
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def stream(self, responses: Sequence[Any], tasks: Sequence[str]) -> AsyncIterator[tuple[int, RewardResult]]:
        """Yield `(index, result)` for each response, as they come. `tasks` are JSON strings, one a response."""
        raise NotImplementedError

    async def score(self, responses: Sequence[Any], tasks: Sequence[str]) -> list[RewardResult]:
        """Score responses, each a `Response` or an environment's answer: a result for each, in order."""
        results: list[RewardResult] = [RewardError("crash", "not scored")] * len(responses)
        async for place, result in self.stream(responses, tasks):
            results[place] = result
        return results


def bounded(text: str, max_characters: int = MAX_TEXT) -> str:
    """The beginning of a text, in characters that UTF-8 can write."""
    more = len(text) - max_characters
    cut = text if more <= 0 else f"{text[: max_characters - 30]}… ({more + 30:,} more)"
    return cut.encode(errors="replace").decode()


def as_score(value: Any) -> RewardValue | RewardError:
    """Convert a function's value for one sample to a reward, or to the error that says why it cannot be one.

    Takes int, float, bool, 0-dimensional arrays and tensors, and mappings with a "score" and, as they may have, "acc"
    (verl).
    """
    if not isinstance(value, Mapping):
        number = _number(value)
        return number if isinstance(number, RewardError) else RewardValue(number)
    if "score" not in value:
        return RewardError("bad_value", f'returned a dict without "score"; its keys: {sorted(map(str, value))}.')
    score, accuracy = _number(value["score"]), None if value.get("acc") is None else _number(value["acc"])
    if isinstance(score, RewardError):
        return score
    return accuracy if isinstance(accuracy, RewardError) else RewardValue.of(score, accuracy)


def _number(value: Any) -> float | RewardError:
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
    try:
        number = float(value)
    except OverflowError:
        return RewardError("bad_value", "returned a whole number that no float can hold.")
    if not math.isfinite(number):
        return RewardError("bad_value", f"returned {number}; a reward is finite.")
    return number


class BadMessageError(ValueError):
    """The error for a message that no reward process of Penstock sends."""


def packed(*message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def packed_result(index: int, result: RewardResult) -> bytes:
    if isinstance(result, RewardError):
        return packed("error", index, result.kind, result.text)
    if result is None:
        return packed("none", index)
    return packed("score", index, result, getattr(result, "accuracy", None))


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


def result_of(line: bytes, due: Container[int]) -> tuple[int, RewardResult] | LoggedValue | None:
    """The position and result of a sample that is still due, or what the function has logged; None: the batch has
    ended. Raises `BadMessageError`."""
    match _parsed(line):
        case ["score", int(index), float(score), float() | None as accuracy] if index in due and math.isfinite(score):
            return index, RewardValue.of(score, accuracy)
        case ["none", int(index)] if index in due:
            return index, None
        case ["metric", str(name), float(value)] if math.isfinite(value):
            return bounded(name, MAX_NAME), value
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
