"""Texts with half of a surrogate pair: a harness that counts in UTF-16 has cut between the two. Pure.

Other code that writes such texts, as tokens or as JSON for people, has `?` in the place of the half.
"""

from collections.abc import Mapping
from typing import Any


def encodable(value: Any) -> Any:
    """Return the same value with all texts made encodable: a text, or what JSON is made of."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {encodable(name): encodable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(one) for one in value]
    return value
