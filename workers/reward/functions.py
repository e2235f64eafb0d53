r"""The rewards that Penstock brings and that execute nothing: `reward.function=math_verify`, `reasoning_gym`, `label`
or `digits`. Those that execute something are in `code.py`.

Each runs in the pool's child processes. Heavy imports are made by `warm`, before the first sample's deadline starts.
"""

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from penstock.workers.problems import verify
from penstock.workers.reward.answers import Answer, are_equal
from penstock.workers.reward.registry import reward


def _warm_math_verify(_options: Mapping[str, Any]) -> None:
    # math-verify warns that its signal-based timeouts are off; the pool's own deadline stands in for them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify("1", "2x")


@reward("math_verify", warm=_warm_math_verify)
def math_verify(response: str, answer: str) -> float:
    """Return 1.0 if the response's final answer equals the reference mathematically, else 0.0.

    The final answer stands after `####`, in the last `\\boxed{}`, or is the last number, list or formula of the
    response (`answers.py`). Raises `ValueError` if the reference answer itself cannot be read.
    """
    return float(are_equal(Answer.of(str(answer)), Answer.of(response)))


def _warm_reasoning_gym(_options: Mapping[str, Any]) -> None:
    importlib.import_module("reasoning_gym")


@reward("reasoning_gym", warm=_warm_reasoning_gym)
def reasoning_gym(response: str, task: dict[str, Any], strict: bool = False) -> float:
    """The score of the problem's own verifier, from 0 to 1. `strict`: 1.0 for full marks, else 0.0."""
    score = verify(response.strip(), task)
    return float(score >= 1.0) if strict else score


@reward("label")
def label(response: str, task: dict[str, Any], column: str = "label") -> float:
    """The score that the dataset gives to its own response: a column of numbers, or of true and false. Raises
    `ValueError` for a row without one."""
    value = task.get(column)
    if not isinstance(value, int | float):
        raise ValueError(f"column {column!r} holds {type(value).__name__} {value!r:.40}, where a number or bool is due")
    return float(value)


@reward("digits")
def digits(response: str, task: dict[str, Any] | None = None) -> float:
    """Share of the response's characters that are digits 0-9; 0 for an empty response. Learnt within a few steps."""
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0
