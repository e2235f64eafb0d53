"""The reference of every key of a run: its type, its default and its meaning, read from the dataclasses of `conf/`,
where they are written once.

`penstock keys WORD …` finds a key. `docs/keys.md` has all of them: `python -m penstock.orchestrator.configuration.keys`
prints that page, and a test compares.
"""

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from rich.console import Console

from penstock.algorithms.catalogue import ALGORITHMS
from penstock.conf.algorithms import AlgorithmConfig
from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.counterparts import counterparts

HEAD = """# Every key

What a recipe or the command line may set, by section: key, type, default, meaning. `penstock keys WORD` finds one in a
terminal, and `penstock validate recipe=NAME` prints what a recipe has set. NAME stands for a name of one's own, N for a
place in a list.

A value is written alike in a recipe and on the command line, and its key's type says what it is. For a text it stays as
it is typed (`no`, `1e3`, `2026-01-01`), except for `null`; quotes around it are not a part of it. A number is `3`,
`0.5` or `1e-3`. `[a, b]` is a list and `{a: 1, b: 2}` a mapping. Where any type will do, as in `options`, numbers,
`true`, `false` and `null` are those, and all else is a text. `${data.seed}` stands for the value of that key; `\\${`
writes `${` itself. In a recipe a key that is there twice is refused.

A secret is a tenant's key, or in `options` what is called a key, token, password or the like, each of `headers`, and
each variable in `env`. Write `env:NAME` or `file:PATH`: the command reads it when it starts, and sends it to the actors
that need it. config.yaml, logs, the page, trackers and errors show this place, or `***`. A URL in `options` or
`tracking.mlflow.tracking_uri` may have a password, which is shown as `***`; that of a place of files may not: fsspec
takes it from variables such as FSSPEC_SFTP_PASSWORD.
"""


BUILT_IN = "penstock.algorithms.builtin."
"""Beginning of the modules of algorithms that come with Penstock. A user's own are documented by the user."""


@dataclass(frozen=True)
class Key:
    """A key of the configuration. `name`: with its section; `text`: what the dataclass says of it."""

    name: str
    kind: str
    default: str
    text: str


@dataclass(frozen=True)
class Section:
    """A dataclass of the configuration with its own keys, those of dataclasses in it apart."""

    title: str
    text: str
    keys: tuple[Key, ...]


def sections() -> list[Section]:
    """Every section, outer ones first, and one for each kind of algorithm."""
    return [*_sections(RunConfig, "", {}), *_algorithms()]


def _sections(kind: type, prefix: str, told: dict[type, str]) -> Iterator[Section]:
    """`told`: the title of each dataclass that has a section; a second place refers to the first."""
    title = prefix.removesuffix(".")
    if (first := told.setdefault(kind, title)) != title:
        yield Section(title, f"As [`{first}`](#{first.replace('.', '').lower()}).", ())
        return
    own, inner = [], []
    for field, hint in _fields_of(kind):
        part, place = _inner_dataclass(hint)
        if part is AlgorithmConfig:
            continue
        if part is None or place:
            own.append(_key(kind, field, hint, prefix))
        if part is not None:
            inner.append((part, f"{prefix}{field.name}{place}."))
    yield Section(title, _text_of(kind), tuple(own))
    for part, name in inner:
        yield from _sections(part, name, told)


def _algorithms() -> Iterator[Section]:
    """A section for each algorithm; of one that is another with some keys changed, these alone."""
    name_of: dict[type, str] = {}
    own = [(name, one) for name, one in sorted(ALGORITHMS.items()) if one.build.__module__.startswith(BUILT_IN)]
    for name, one in own:
        name_of.setdefault(one.config_class, name)
    for kind, name in name_of.items():
        also = [other for other, one in own if one.config_class is kind and other != name]
        base = next((one for one in kind.__mro__[1:] if one in name_of), None)
        keys = _keys_of(kind, "algorithm.")
        text = _text_of(kind)
        if base is not None:
            keys = [key for key in keys if key not in _keys_of(base, "algorithm.")]
            text += f" All else is as of [`algorithm={name_of[base]}`](#algorithm{name_of[base]})."
        yield Section(f"algorithm={', '.join([name, *also])}", text, tuple(keys))


def _keys_of(kind: type, prefix: str) -> list[Key]:
    return [_key(kind, field, hint, prefix) for field, hint in _fields_of(kind) if field.name != "name"]


def _fields_of(kind: type) -> list[tuple["Field[Any]", Any]]:
    hints = typing.get_type_hints(kind)
    return [(field, hints[field.name]) for field in fields(kind)]


def _inner_dataclass(hint: Any) -> tuple[type | None, str]:
    """The dataclass that a field holds, and its place below the field's name: one, a list's or a dictionary's."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    place = {list: ".N", dict: ".NAME"}.get(origin, "") if origin is not None else ""
    found = [one for one in (hint, *arguments) if isinstance(one, type) and is_dataclass(one)]
    return (found[0], place) if found else (None, "")


def _key(kind: type, field: "Field[Any]", hint: Any, prefix: str) -> Key:
    return Key(prefix + field.name, _type_name(hint), _default(field), texts_of(kind).get(field.name, ""))


def _type_name(hint: Any) -> str:
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    for module in ("typing.", *(f"{one.__module__}." for one in typing.get_args(hint) if is_dataclass(one))):
        name = name.replace(module, "")
    return name.replace("NoneType", "None").replace(" | None", " or null").replace(" | ", " or ")


def _default(field: "Field[Any]") -> str:
    if field.default is not MISSING:
        value = field.default
    elif field.default_factory is not MISSING:
        value = field.default_factory()
    else:
        return "required"
    return _as_yaml(value)


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_yaml(one)}" for key, one in value.items()) + "}"
    return str(value) or '""'


@cache
def texts_of(kind: type) -> dict[str, str]:
    """What stands below each field of a dataclass, and of those that it is derived from."""
    found: dict[str, str] = {}
    for one in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if is_text:
                    found[field.target.id] = _one_line(str(after.value.value))  # type: ignore[attr-defined]
    return found


def _text_of(kind: type) -> str:
    text = kind.__doc__ or ""
    return "" if text.startswith(f"{kind.__name__}(") else _one_line(text)  # dataclasses write this themselves


def _one_line(text: str) -> str:
    return " ".join(text.split())


def reference() -> str:
    """The page of all keys, as Markdown."""
    lines = [HEAD]
    for section in sections():
        lines += [f"## {section.title or 'The run'}\n", *([section.text, ""] if section.text else [])]
        for key in section.keys:
            told = f": {key.text}" if key.text else ""
            lines.append(f"- **`{key.name}`** `{key.kind}` = `{key.default}`{told}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def show(words: Sequence[str], console: Console) -> None:
    """Print the keys whose names have all these words, or, where none has, those whose meanings do; and what keys of
    other frameworks with them are here. Raises `ConfigError` if there are none."""
    keys = [key for section in sections() for key in section.keys]
    wanted = " ".join(words).lower().split()
    found = [key for key in keys if all(word in key.name.lower() for word in wanted)]
    found = found or [key for key in keys if all(word in f"{key.name} {key.text}".lower() for word in wanted)]
    others = list(counterparts([part for word in wanted for part in word.split("_")])) if wanted else []
    if not found and not others:
        raise ConfigError(f"no key is called {' '.join(words)!r} or says so of itself. `penstock keys` lists all.")
    for key in dict.fromkeys(found):
        console.print(f"[bold]{key.name}[/] [dim]{key.kind} =[/] {_escaped(key.default)}", highlight=False)
        if key.text and words:
            console.print(textwrap.indent(textwrap.fill(key.text, max(40, console.width - 4)), "    "), markup=False)
    for framework, theirs, said in others:
        console.print(f"[dim]{framework}'s[/] {theirs} [dim]is here[/] {_escaped(said)}", highlight=False)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    print(reference(), end="")
