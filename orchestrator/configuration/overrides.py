"""Words of the command line, `trainer.max_steps=20`, and values of recipes: fitted to the types of their keys, and
explained where they do not fit.

`values.py` reads what is written, OmegaConf converts what is left; its own errors do not reach a user.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from penstock.conf.algorithms import AlgorithmConfig
from penstock.conf.errors import ConfigError, suggest
from penstock.conf.renamed import present_key
from penstock.conf.run import RunConfig
from penstock.conf.secret import hide_word, reveal
from penstock.orchestrator.configuration.counterparts import counterpart
from penstock.orchestrator.configuration.values import NULLS, Plain, literal, unquoted

CHOICES = ("recipe", "algorithm", "model")
"""Keys whose plain value is a name that stands for many keys."""
SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
"""Words that stand for true and false where the key wants one of these."""


@dataclass(frozen=True)
class Override:
    key: str
    value: Any
    """The value: of a word its text without quotes, a `Plain` if it had none."""
    text: str
    """The word as typed."""


def parse(words: Iterable[str]) -> list[Override]:
    """Parse `key=value` words. Raises `ConfigError` for a word that is none."""
    return [_parse_word(reveal(word)) for word in words]


def _parse_word(word: str) -> Override:
    key, equals, text = word.partition("=")
    key = key.strip().lstrip("+")
    if not equals or not key or key.startswith(("-", "~")) or any(c.isspace() for c in key):
        hint = f" To see all keys: penstock validate recipe={word}" if word.isidentifier() else ""
        raise ConfigError(f"{word!r} is not key=value, like recipe=arithmetic or trainer.max_steps=20.{hint}")
    return Override(present_key(key), unquoted(text), hide_word(word))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@dataclass(frozen=True)
class Schema:
    """The types of a run's keys. `algorithm`: the class of that section."""

    algorithm: type[AlgorithmConfig] = AlgorithmConfig

    def keys(self, kind: type = RunConfig, prefix: str = "") -> Iterator[str]:
        """Every dotted key that can be set."""
        for name, hint in self._hints(kind).items():
            if dataclasses.is_dataclass(hint):
                yield from self.keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
            else:
                yield prefix + name

    def fit(self, values: Any, where: str = "", hint: Any = RunConfig, key: str = "") -> Any:
        """Nested values with every `Plain` text as the type of its key has it. What fits no type stays as it is
        written, and OmegaConf refuses it.

        Raises `ConfigError` for an unknown key, with the nearest one, and for a section that is no mapping. `where`
        opens the message; `hint`: the type of `values`, which are those of `key`.
        """
        members = _members(hint)
        if isinstance(values, Plain):
            values = _value_of(values, members)
        section = next((one for one in members if dataclasses.is_dataclass(one)), None)
        if section is not None and values is not None and not isinstance(values, dict):
            names = ", ".join(self._hints(section))  # type: ignore[arg-type]
            raise ConfigError(f"{where}{_as_word(key, values)}: is a section; set its keys: {names}.")
        if isinstance(values, dict):
            return {self._name(one, members): self.fit(value, where, *self._inner(one, value, members, key, where))
                    for one, value in values.items()}  # fmt: skip
        if isinstance(values, list):
            inner = next((typing.get_args(one)[0] for one in members if typing.get_origin(one) is list), Any)
            return [self.fit(value, where, inner, f"{key}.{place}") for place, value in enumerate(values)]
        return values

    def _inner(self, name: Any, value: Any, members: tuple[Any, ...], key: str, where: str) -> tuple[Any, str]:
        """Type and key of the value that a mapping holds under a name."""
        dotted = f"{key}.{name}" if key else str(name)
        for one in members:
            if dataclasses.is_dataclass(one):
                hints = self._hints(one)  # type: ignore[arg-type]
                if name not in hints:
                    while isinstance(value, dict) and len(value) == 1:
                        ((name, value),) = value.items()
                        dotted = f"{dotted}.{name}"
                    raise ConfigError(f"{where}{dotted}: unknown key{self._nearest(dotted, key, hints)}")
                return hints[name], dotted
            if typing.get_origin(one) is dict:
                return typing.get_args(one)[1], dotted
        return Any, dotted

    def _name(self, name: Any, members: tuple[Any, ...]) -> Any:
        """A key of a mapping: a text, unless any type will do."""
        texts = any(dataclasses.is_dataclass(one) or typing.get_origin(one) is dict for one in members)
        found = str(name) if texts or not isinstance(name, Plain) else literal(name)
        return found if isinstance(found, str | int | float | bool) else str(name)

    def _hints(self, kind: type) -> dict[str, Any]:
        hints = _hints(kind)
        return hints | {"algorithm": self.algorithm} if kind is RunConfig else hints

    def _nearest(self, dotted: str, section: str, there: Iterable[str]) -> str:
        """The key that was probably meant, or the section's keys, as half a sentence."""
        known = list(self.keys())
        leaf = dotted.rpartition(".")[2]
        if not any(key.startswith(f"{section}.") for key in known) and section:  # an entry of a mapping
            return suggest(leaf, there)
        near = [key for key in known if key.rpartition(".")[2] == leaf]
        if (said := counterpart(dotted)) and not (near and dotted == leaf):
            return f". {said}"
        near = near or difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
        if not near:
            leaves = {key.rpartition(".")[2]: key for key in known}
            near = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.65)]
        if near:
            return f"; did you mean {' or '.join(near[:3])}?"
        siblings = [key for key in known if section and key.startswith(f"{section}.")]
        if siblings:
            return f". Keys there: {', '.join(siblings)}."
        return f". Sections: {', '.join(there)}. `penstock validate recipe=arithmetic` prints every key."


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a key may have."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _value_of(text: Plain, members: tuple[Any, ...]) -> Any:
    """What a plain text is for a key of these types: where it may be a text, a text, unless another of them fits."""
    if bool in members and text.lower() in SWITCHES:
        return SWITCHES[text.lower()]
    if str in members and text not in NULLS:
        found = literal(text) if set(members) - {str, types.NoneType} else None
        return found if type(found) in members and found is not None else str(text)
    return literal(text)


def apply(tree: DictConfig, override: Override, schema: Schema) -> None:
    """Set one key. Raises `ConfigError` naming key, value and expected type."""
    nested: Any = override.value
    for part in reversed(override.key.split(".")):
        nested = {part: nested}
    value = schema.fit(nested)
    for part in override.key.split("."):
        value = value[part]
    try:
        # A mapping is merged into the present one; an empty one empties it: reward.options={}
        key, whole = _target(tree, override.key, value)
        OmegaConf.update(tree, key, whole, merge=whole != {}, force_add=True)
    except OmegaConfBaseException as error:
        raise wrong_type(tree, error, override.key, value) from None


def _target(tree: DictConfig, key: str, value: Any) -> tuple[str, Any]:
    """The deepest section that is there, or the key itself, and what to merge into it: an entry of a mapping of
    sections (`other_models.teacher.recipe=sft`) has to come as a whole."""
    parts, node = key.split("."), tree
    for depth, part in enumerate(parts[:-1]):
        if depth and not (OmegaConf.is_dict(node) and part in node):
            for missing in reversed(parts[depth:]):
                value = {missing: value}
            return ".".join(parts[:depth]), value
        node = node[part]
    return key, value


def wrong_type(tree: DictConfig, error: OmegaConfBaseException, key: str, value: Any, where: str = "") -> ConfigError:
    """OmegaConf's refusal of a value as one sentence."""
    full_key = str(error.full_key or key)
    if "${" in str(value):
        return unresolved(error, key, where)
    expected = expected_type(tree, full_key.partition("[")[0])
    if expected == "unknown" or isinstance(error, ConfigKeyError):
        return ConfigError(f"{where}{_as_word(full_key, value)}: {str(error).splitlines()[0]}.")
    hint = _syntax_hint(key, expected, value)
    return ConfigError(f"{where}{_as_word(full_key, value)}: expected {expected}, got {type(value).__name__}.{hint}")


def _syntax_hint(key: str, expected: str, value: Any) -> str:
    """A sentence about how a value of the type is written, if that may be what is wrong."""
    if expected.startswith("list") and not isinstance(value, list):
        return f" A list is written {key}=[a,b]."
    if expected.startswith("str") and not isinstance(value, str):
        return " Write it in quotes if it is a text."
    if isinstance(value, str) and ("," in value or "(" in value):
        return f" A run has one value of it; `penstock sweep {key}={value}` makes a run of each."
    return ""


def unresolved(error: OmegaConfBaseException, key: str = "", where: str = "") -> ConfigError:
    """The error about a value with `${…}` that names no key, or cannot be read."""
    return ConfigError(
        f"{where}{error.full_key or key}: {str(error).splitlines()[0]}. ${{…}} stands for the value of another key. "
        "Where it is a part of the text itself, write \\${…}."
    )


def _as_word(key: str, value: Any) -> str:
    return hide_word(f"{key}={'null' if value is None else value}")


def expected_type(tree: DictConfig, dotted: str) -> str:
    """The annotation of a key, as text: `int | None`."""
    section, _, leaf = dotted.rpartition(".")
    parent = OmegaConf.select(tree, section) if section else tree
    owner = OmegaConf.get_type(parent) if isinstance(parent, DictConfig) else None
    if owner is None or not dataclasses.is_dataclass(owner):
        return "unknown"
    hint = _hints(owner).get(leaf)
    name = str(hint) if not isinstance(hint, type) or typing.get_args(hint) else hint.__name__
    return name.replace("typing.", "").replace("NoneType", "None").replace("None", "null")
