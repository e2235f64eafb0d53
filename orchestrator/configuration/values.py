"""Values as people write them, in a YAML file or in a word of the command line. The same text means the same in both.

    file ─▶ read_yaml ─┐
    word ─▶ unquoted ──┴▶ texts: `Plain` without quotes ─▶ `Schema.fit`: what the type of their key makes of them
                                                           `literal`: what they are where any type will do

In a YAML file YAML says what is a mapping, a list and a quoted text, and nothing else: 1:30, no, 2026-01-01 and 010 are
texts in it, and 1e-3 is a number.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from penstock.conf.errors import ConfigError

NULLS = ("null", "~")
BOOLS = {"true": True, "false": False}
DIGITS = r"(?:0|[1-9](?:_?\d)*)"
INT = re.compile(rf"[+-]?{DIGITS}")
FLOAT = re.compile(rf"[+-]?(?:(?:{DIGITS}\.|{DIGITS}?\.\d(?:_?\d)*)(?:e[+-]?\d+)?|{DIGITS}e[+-]?\d+)", re.IGNORECASE)
NOT_FINITE = re.compile(r"([+-]?)\.?(inf|nan)", re.IGNORECASE)
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
CLOSING = {"[": "]", "{": "}", "(": ")"}
MERGE = "tag:yaml.org,2002:merge"


class Plain(str):
    """A text that was written without quotes, so that it may stand for a number or another value. `line`: its line in
    the file, 0 for none."""

    line: int

    def __new__(cls, text: str, line: int = 0) -> "Plain":
        made = super().__new__(cls, text)
        made.line = line
        return made

    def __repr__(self) -> str:
        return f"Plain({super().__repr__()})"


def unquoted(text: str) -> str:
    """The text within quotes, or the same text as a `Plain`. Within quotes, a backslash before a quote makes it a part
    of the text; any other backslash is one itself."""
    quoted = text.strip()
    if not QUOTED.fullmatch(quoted):
        return Plain(text)
    return re.sub(rf"(\\+)(?={quoted[0]}|\Z)", lambda found: found[1][: len(found[1]) // 2], quoted[1:-1])


def literal(text: str) -> Any:
    """The value that a plain text stands for where any type will do: null, true, 3, 1e-3, inf, [a, b], {a: 1}, or
    itself. A number too large for a float is a text, such as the name of a commit."""
    word = text.strip().lower()
    if word in NULLS:
        return None
    if word in BOOLS:
        return BOOLS[word]
    if INT.fullmatch(word):
        return int(word)
    if FLOAT.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    if named := NOT_FINITE.fullmatch(word):
        return float(named[1] + named[2])
    if word[:1] in ("[", "{"):
        try:
            return _FlowReader(text).whole()
        except _NotFlow:
            pass
    return str(text)


def plain(value: Any) -> Any:
    """What is read, with all its plain texts as the literals that they stand for."""
    if isinstance(value, Plain):
        found = literal(value)
        return found if isinstance(found, str) else plain(found)
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


class _NotFlow(Exception):
    """A text with a bracket at its start that is no list or mapping."""


def split(text: str) -> list[str]:
    """Parts of a text between commas, as they are written; commas within quotes and brackets part nothing."""
    flow, ends = _FlowReader(text), (",", "")
    found = [flow.written(ends)]
    while flow.passes(","):
        found.append(flow.written(ends))
    return found


class _FlowReader:
    """Reader of a list or a mapping in one line."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text.strip(), 0

    def whole(self) -> Any:
        value = self._value(("",))
        if self._at < len(self._text):
            raise _NotFlow
        return value

    def written(self, ends: tuple[str, ...]) -> str:
        """The text up to one of the characters `ends` (an empty one: the end) that is not within brackets of its
        own."""
        self._skip()
        start, quoted = self._at, QUOTED.match(self._text, self._at)
        if quoted and self._text[quoted.end() :].lstrip()[:1] in ends:
            self._at = quoted.end()
            self._skip()
            return quoted[0]
        closing = [""]
        while len(closing) > 1 or self._next() not in ends:
            if len(closing) > 1 and self._next() == closing[-1]:
                closing.pop()
            elif self._next() in CLOSING:
                closing.append(CLOSING[self._next()])
            if self._at == len(self._text):
                raise _NotFlow
            self._at += 1
        if start == self._at:
            raise _NotFlow
        return self._text[start : self._at].strip()

    def passes(self, mark: str) -> bool:
        """Go past a mark, if it is the next character."""
        found = self._next() == mark
        self._at += found
        return found

    def _value(self, ends: tuple[str, ...]) -> Any:
        self._skip()
        found: Any
        if self.passes("["):
            found = [self._value((",", "]")) for _ in self._elements("]")]
        elif self.passes("{"):
            found = dict(self._pair() for _ in self._elements("}"))
        else:
            return unquoted(self.written(ends))
        self._skip()
        return found

    def _pair(self) -> tuple[str, Any]:
        key = unquoted(self.written((":",)))
        if not self.passes(":"):
            raise _NotFlow
        return key, self._value((",", "}"))

    def _elements(self, end: str) -> Iterator[None]:
        """Stop at each element, which the caller reads, and go past the end."""
        self._skip()
        while not self.passes(end):
            yield
            if not self.passes(",") and self._next() != end:
                raise _NotFlow
            self._skip()

    def _skip(self) -> None:
        while self._next().isspace():
            self._at += 1

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]


def read_yaml(file: Path) -> Any:
    """What a file holds, with `Plain` texts. Raises `ConfigError` naming file and line, also for a key that is there
    twice; `OSError`."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except _DuplicateKey as error:
        raise duplicate_key_error(file, *error.args) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{where}: not valid YAML ({getattr(error, 'problem', None) or error}).") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a text in UTF-8 ({error}).") from None


def duplicate_key_error(file: Path, name: str, *keys: str) -> ConfigError:
    """The error about a key that a file has twice. `keys`: both as they are written, with their lines."""
    lines = sorted(getattr(key, "line", 0) for key in keys)
    where = f" lines {lines[0]} and {lines[1]}" if lines[0] else ""
    return ConfigError(f"{file}{where}: {name} is there twice, and only one would count. Write it once.")


class _DuplicateKey(Exception):
    """A key that is in one mapping twice."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without guesses about types, and without keys that are there twice."""

    yaml_implicit_resolvers = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        known: dict[str, Plain] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                here = Plain(key.value, key.start_mark.line + 1)
                if here in known:
                    raise _DuplicateKey(here, known[here], here)
                known[here] = here
        return node

    def construct_text(self, node: yaml.ScalarNode) -> str | None:
        if node.style is not None:
            return str(node.value)
        return Plain(node.value, node.start_mark.line + 1) if node.value else None


for tag in ("tag:yaml.org,2002:str", MERGE):  # `<<` is a merge where it is a key, and a text elsewhere
    _Loader.add_constructor(tag, _Loader.construct_text)
