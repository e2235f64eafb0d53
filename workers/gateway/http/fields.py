"""Reads JSON that a client has sent: each value is of the type that is due, or `BadRequest` names its field. Pure."""

import json
import math
from collections.abc import Mapping
from typing import Any

from penstock.workers.gateway.http.errors import BadRequest

MOST_VALUES = 2**20
"""Most values of a body: their number, and not the length of texts and pictures, is what parsing costs."""


def parsed(body: bytes) -> "Fields":
    """The object of a request's body."""
    if has_many(body):
        raise BadRequest(f"the body has more than {MOST_VALUES:,} values: leave out what is no message or tool.")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}.") from None
    if not isinstance(value, Mapping):
        raise BadRequest(f"the body is a JSON object, not {_kind(value)}.")
    return Fields(value)


def has_many(text: bytes) -> bool:
    """Return whether a text in JSON has more than `MOST_VALUES`."""
    return sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES


class Fields:
    """Fields of one object. An absent one or null is None; `need_…` raise for that, too."""

    def __init__(self, value: Mapping[str, Any], path: str = "") -> None:
        """`path`: place of the object in the request, such as messages[2]."""
        self.value, self.path = value, path

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def raw(self, name: str) -> Any:
        return self.value.get(name)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, text: str, code: str = "") -> BadRequest:
        return BadRequest(text, self.at(name), code)

    def text(self, name: str) -> str | None:
        return self._of(name, str, "text")

    def need_text(self, name: str) -> str:
        return str(self._needed(name, self.text(name)))

    def flag(self, name: str) -> bool:
        """The flag; False if it is absent."""
        return bool(self._of(name, bool, "true or false"))

    def number(self, name: str, low: float, high: float = math.inf) -> float | None:
        value = self.value.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or value == math.inf:
            within = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise self.wrong(name, f"must be a number {within}, not {_shown(value)}.")
        return float(value)

    def whole(self, name: str, low: int) -> int | None:
        value = self.value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(name, f"must be a whole number of at least {low}, not {_shown(value)}.")
        return value

    def object(self, name: str) -> "Fields | None":
        value = self._of(name, Mapping, "an object")
        return Fields(value, self.at(name)) if value is not None else None

    def need_object(self, name: str) -> "Fields":
        found: Fields = self._needed(name, self.object(name))
        return found

    def objects(self, name: str) -> "list[Fields]":
        """The objects; empty if they are absent."""
        values = self._of(name, list, "a list") or []
        for index, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise self.wrong(f"{name}[{index}]", f"must be an object, not {_kind(value)}.")
        return [Fields(value, self.at(f"{name}[{index}]")) for index, value in enumerate(values)]

    def need_objects(self, name: str) -> "list[Fields]":
        """The objects, at least one."""
        found = self.objects(name)
        if not found:
            raise self.wrong(name, "is missing or empty.")
        return found

    def texts(self, name: str) -> list[str] | None:
        """The texts: a text, or a list of them; none of them empty."""
        value = self.value.get(name)
        if value is None:
            return None
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
            raise self.wrong(name, "must be a text or a list of texts that are not empty.")
        return values

    def refuse(self, name: str, why: str, *harmless: Any, code: str = "") -> None:
        """Raise if the field is there, and is none of the harmless values."""
        value = self.value.get(name)
        if value not in (None, [], {}, *harmless):
            raise self.wrong(name, why, code)

    def _of(self, name: str, kind: Any, called: str) -> Any:
        value = self.value.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, f"must be {called}, not {_kind(value)}.")
        return value

    def _needed(self, name: str, value: Any) -> Any:
        if value is None:
            raise self.wrong(name, "is missing.")
        return value


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _shown(value: Any) -> str:
    return f"{json.dumps(value)[:40]}"
