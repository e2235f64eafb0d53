"""`penstock translate FILE`: a configuration of verl or TRL as a recipe, with what has no counterpart.

FILE.yaml                    keys, nested or with dots
FILE.sh, or anything else    the words key=value or --key value of a command in it
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from penstock.algorithms.catalogue import ALGORITHMS
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.translation.rules import Framework, Translation, Values, translate
from penstock.orchestrator.configuration.translation.trl import TRL
from penstock.orchestrator.configuration.translation.verl import VERL

FRAMEWORKS = (VERL, TRL)
WORD = re.compile(r"[+~]*([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def show(path: str, console: Console, target: str | None = None) -> None:
    """Print the recipe, or write it to the file `target`, and say what was not translated. Raises `ConfigError`."""
    framework, found = translated(read(path))
    recipe = as_yaml(framework, found)
    if target is None:
        console.print(recipe, markup=False, highlight=False, soft_wrap=True, end="")
    else:
        Path(target).write_text(recipe)
        console.print(f"{len(found.became)} keys of {framework.name} are in {target}", highlight=False)
    if found.lost:
        console.print(f"\n[yellow]not translated[/], {len(found.lost)} keys:", highlight=False)
    for key, why in found.lost:
        console.print(f"  [bold]{key}[/]: ", end="", highlight=False)
        console.print(why, markup=False, highlight=False, soft_wrap=True)


def translated(values: Values) -> tuple[Framework, Translation]:
    """Translate a flat configuration of whichever framework's it is. Raises `ConfigError` for none that is known."""
    framework = next((one for one in FRAMEWORKS if one.is_of(values)), None)
    if framework is None:
        raise ConfigError(
            f"none of the {len(values)} keys is one of verl's (actor_rollout_ref.…) or TRL's (num_generations, …), so "
            "there is nothing to translate. A recipe of Penstock is run as it is: recipe=DIRECTORY."
        )
    found = translate(framework, values)
    _fit_algorithm(found)
    return framework, found


def _fit_algorithm(found: Translation) -> None:
    """Leave out what the chosen algorithm has no key for, and say which has one."""
    chosen = found.recipe.get("algorithm", {})
    known = {field.name for field in fields(ALGORITHMS[chosen.get("name", "grpo")].config_class)}
    for name in [name for name in chosen if name not in known]:
        value = chosen.pop(name)
        if value:
            why = f"algorithm={chosen.get('name', 'grpo')} has no such key; algorithm=policy_gradient has more of them"
            found.lost.append((f"algorithm.{name}={value}", why))


def as_yaml(framework: Framework, found: Translation) -> str:
    """The recipe as text."""
    head = f"description: Translated from {framework.name}; see docs/coming_from.md for what differs.\n"
    return head + str(yaml.safe_dump(found.recipe, sort_keys=False, width=110))


def read(path: str) -> dict[str, Any]:
    """Read a file's keys, flat. Raises `ConfigError`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    text = file.read_text(encoding="utf-8")
    if file.suffix in (".yaml", ".yml"):
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from None
        return dict(_flat(found)) if isinstance(found, Mapping) else {}
    return _words(text, path)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _words(text: str, path: str) -> dict[str, Any]:
    """The words `key=value` and `--key value` of a shell script. Variables stay as they are."""
    found: dict[str, Any] = {}
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{path}: not a shell script that can be read: {error}") from None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            found[name] = _value(value if given else "true" if after.startswith("--") or not after else after)
        elif match := WORD.fullmatch(word):
            found[match[1]] = _value(match[2])
    return found


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)  # YAML 1.1 takes 1e-6 for a text
    return value
