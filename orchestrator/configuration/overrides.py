"""Words of the command line, `trainer.max_steps=20`: parsed, checked against the schema, explained when they do not
fit.

Hydra's grammar reads the values, OmegaConf converts them; neither's own errors reach a user.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from penstock.conf.errors import ConfigError
from penstock.conf.renamed import present_key

CHOICES = ("recipe", "algorithm", "model")
"""Keys whose plain value is a name that stands for many keys."""


@dataclass(frozen=True)
class Override:
    key: str
    value: Any
    text: str
    """The word as typed."""


def parse(words: Iterable[str]) -> list[Override]:
    """Parse `key=value` words. Raises `ConfigError` for a word that is none."""
    parser = OverridesParser.create()
    return [_parse_word(word, parser) for word in words]


def _parse_word(word: str, parser: OverridesParser) -> Override:
    key, equals, text = word.partition("=")
    key = key.strip().lstrip("+")
    if not equals or not key or key.startswith(("-", "~")) or any(c.isspace() for c in key):
        hint = f" To see all keys: penstock validate recipe={word}" if word.isidentifier() else ""
        raise ConfigError(f"{word!r} is not key=value, like recipe=arithmetic or trainer.max_steps=20.{hint}")
    try:
        parsed = parser.parse_override(f"x={text}")
        # What is no literal of Hydra's grammar ("Solve: {prompt}", "a, b") is text; the schema says whether text is
        # welcome.
        value = text if parsed.is_sweep_override() else parsed.value()
    except HydraException:
        value = _list_of_words(text) or text
    return Override(present_key(key), value, word)


def _list_of_words(text: str) -> list[Any] | None:
    """Parse a list of words as YAML, such as `[trainer.max_steps=300]`: Hydra's grammar wants quotes around such
    words."""
    try:
        value = yaml.safe_load(text) if text.startswith("[") else None
    except yaml.YAMLError:
        return None
    return value if isinstance(value, list) else None


def keys_of(tree: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration that can be set."""
    for key in tree:
        path = f"{prefix}{key!s}"
        child = tree._get_node(key)
        if (
            isinstance(child, DictConfig)
            and not child._is_none()
            and dataclasses.is_dataclass(OmegaConf.get_type(child))
        ):
            yield from keys_of(child, f"{path}.")
        else:
            yield path


def check_keys(tree: DictConfig, values: dict[str, Any], where: str = "", path: str = "") -> None:
    """Check that every key of nested `values` is in the schema `tree`. Raises `ConfigError` with the nearest key;
    `where` opens the message."""
    _walk(tree, tree, values, where, path)


def _walk(root: DictConfig, node: DictConfig, values: dict[str, Any], where: str, path: str) -> None:
    for key, value in values.items():
        dotted = f"{path}{key}"
        if not dataclasses.is_dataclass(OmegaConf.get_type(node)):
            return  # a free dictionary, such as reward.options
        if key not in node:
            raise ConfigError(f"{where}{dotted}: unknown key{nearest_key(dotted, root)}")
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            if isinstance(value, dict):
                _walk(root, child, value, where, f"{dotted}.")
            elif dataclasses.is_dataclass(OmegaConf.get_type(child)):
                raise ConfigError(f"{where}{dotted}={value}: is a section; set its keys: {', '.join(map(str, child))}.")


def nearest_key(dotted: str, tree: DictConfig) -> str:
    """The key that was probably meant, or the section's keys, as half a sentence."""
    known = list(keys_of(tree))
    leaf = dotted.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
    if not near:
        leaves = {key.rpartition(".")[2]: key for key in known}
        near = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.65)]
    if near:
        return f"; did you mean {' or '.join(near[:3])}?"
    section = dotted.rpartition(".")[0]
    siblings = [key for key in known if section and key.startswith(f"{section}.")]
    if siblings:
        return f". Keys there: {', '.join(siblings)}."
    return f". Sections: {', '.join(str(key) for key in tree)}. `penstock validate recipe=arithmetic` prints every key."


def apply(tree: DictConfig, override: Override) -> None:
    """Set one key. Raises `ConfigError` naming key, value and expected type."""
    nested: Any = override.value
    for part in reversed(override.key.split(".")):
        nested = {part: nested}
    check_keys(tree, nested)
    try:
        # A mapping is merged into what is there; an empty one empties it: reward.options={}
        key, value = _where(tree, override.key, override.value)
        OmegaConf.update(tree, key, value, merge=value != {}, force_add=True)
    except OmegaConfBaseException as error:
        raise wrong_type(tree, error, override.key, override.value) from None


def _where(tree: DictConfig, key: str, value: Any) -> tuple[str, Any]:
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
    expected = expected_type(tree, full_key.partition("[")[0])
    hint = f" A list is written {key}=[a,b]." if expected.startswith("list") and not isinstance(value, list) else ""
    if expected == "unknown" or isinstance(error, ConfigKeyError):
        return ConfigError(f"{where}{full_key}={value}: {str(error).splitlines()[0]}.")
    return ConfigError(f"{where}{full_key}={_show(value)}: expected {expected}, got {type(value).__name__}.{hint}")


def _show(value: Any) -> str:
    return "null" if value is None else str(value)


def expected_type(tree: DictConfig, dotted: str) -> str:
    """The annotation of a key, as text: `int | None`."""
    section, _, leaf = dotted.rpartition(".")
    parent = OmegaConf.select(tree, section) if section else tree
    owner = OmegaConf.get_type(parent) if isinstance(parent, DictConfig) else None
    if owner is None or not dataclasses.is_dataclass(owner):
        return "unknown"
    hint = typing.get_type_hints(owner).get(leaf)
    name = str(hint) if not isinstance(hint, type) or typing.get_args(hint) else hint.__name__
    return name.replace("typing.", "").replace("NoneType", "None").replace("None", "null")
