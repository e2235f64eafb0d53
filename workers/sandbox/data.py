"""The data that code may return, and the comparison with what was expected. Pure; all of it runs outside the fence.

JSON and nothing else: None, bool, int, finite float, str, list, dict with str keys. Tuples come as lists.
"""

import json
import math
from typing import Any

from penstock.conf.errors import NotPlainData


def parse(text: bytes) -> Any:
    """Parse JSON. Raises `NotPlainData` for what is no JSON, is no UTF-8, is nested too deeply, or has a number that is
    not finite or has thousands of digits."""
    try:
        return json.loads(text.decode(), parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise NotPlainData("nested too deeply") from None
    except ValueError as error:
        raise NotPlainData(f"no plain data: {str(error)[:200]}") from None


def same(expected: Any, got: Any, tolerance: float = 1e-9) -> bool:
    """Return whether two values are equal. Numbers are equal within the relative `tolerance` if one is a float; true
    and false are no numbers."""
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None or got is None:
        return expected is got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return _same_number(expected, got, tolerance)
    if isinstance(expected, str) and isinstance(got, str):
        return expected == got
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(same(a, b, tolerance) for a, b in zip(expected, got, strict=True))
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same(expected[key], got[key], tolerance) for key in expected)
    return False


def _same_number(expected: float, got: float, tolerance: float) -> bool:
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    try:
        return math.isclose(expected, got, rel_tol=tolerance)
    except OverflowError:  # an int that no float holds
        return expected == got


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large")
    return number
