"""`penstock translate FILE`: a configuration of verl or TRL as a recipe, what is not in it, and whether it starts.

FILE.yaml                    keys, nested or with dots
FILE.sh, or anything else    the words key=value or --key value of the command in it that trains
    ─▶ their keys, flat ─▶ rules (`counterparts.py`) ─▶ a recipe, what each key has become, what has no counterpart
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from penstock.algorithms.catalogue import ALGORITHMS
from penstock.conf.errors import ConfigError, PenstockError
from penstock.orchestrator.cluster.placement.actors import needed
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.counterparts import Framework, NotTranslated, Values, frameworks
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.configuration.shell import commands_of, is_unresolved
from penstock.orchestrator.configuration.values import Plain, plain, read_yaml
from penstock.workers.user_code import RECIPE_FILE

WORD = re.compile(r"[+~]*([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
PROCESSES = ("num_processes", "nproc_per_node")
UNKNOWN = "not known to this translation: `penstock keys` may know a key for it"


@dataclass
class Translation:
    """A translated configuration."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """Our keys, nested as in a recipe.yaml."""
    became: list[tuple[str, str]] = field(default_factory=list)
    """Their keys, and what each has become."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """Their keys without a counterpart, and why, or what to do."""
    assumed: Values = field(default_factory=dict)
    """Our keys that none of theirs has given a value."""


def translated(values: Values) -> tuple[Framework, Translation]:
    """Translate a flat configuration of whichever framework's it is. Raises `ConfigError` for none that is known."""
    framework = next((one for one in frameworks() if one.is_of(values)), None)
    if framework is None:
        raise ConfigError(
            f"none of the {len(values)} keys is one of verl's (actor_rollout_ref.…) or TRL's (num_generations, …), so "
            "there is nothing to translate. A recipe of Penstock is run as it is: recipe=DIRECTORY."
        )
    found = translate(framework, values)
    _fit_algorithm(found)
    return framework, found


def translate(framework: Framework, written: Values) -> Translation:
    """Translate a flat configuration. A key without a rule is reported, never dropped."""
    found = Translation(lost=[(key, why) for key, why in framework.asked.items() if key not in written])
    unresolved = {key for key, value in written.items() if is_unresolved(str(value))}
    found.lost += [
        (key, f"its value {written[key]!r} is known only when the script runs") for key in sorted(unresolved)
    ]
    values = {key: value for key, value in written.items() if key not in unresolved}
    ours: dict[str, Any] = {}
    known: set[str] = set()
    for one in framework.rules:
        given = [key for key in one.theirs if key in values]
        known |= set(given)
        if not given:
            continue
        try:
            made = one.translate(*(values.get(key) for key in one.theirs))
        except NotTranslated as error:
            found.lost += [(key, str(error)) for key in given]
            continue
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError):  # such as a shell's variable
            found.lost += [(key, f"its value {values[key]!r} is none that it can have") for key in given]
            continue
        ours |= made
        what = ", ".join(f"{key}={_shown(value)}" for key, value in made.items()) or "nothing: it is so anyway"
        found.became += [(key, what) for key in given]
    for key in values:
        if key not in known:
            found.lost.append((key, framework.reason(key) or UNKNOWN))
    set_ones = ours.keys() | ({"reward.function"} if "rewards" in ours else set())
    found.assumed = {key: value for key, value in framework.always.items() if key not in set_ones}
    for key, value in {**found.assumed, **ours}.items():
        _put(found.recipe, key.split("."), value)
    return found


def _fit_algorithm(found: Translation) -> None:
    """Leave out what the chosen algorithm has no key for, and say which has one."""
    chosen = found.recipe.get("algorithm", {})
    known = {field.name for field in fields(ALGORITHMS[chosen.get("name", "grpo")].config_class)}
    for name in [name for name in chosen if name not in known]:
        value = chosen.pop(name)
        if value:
            why = f"algorithm={chosen.get('name', 'grpo')} has no such key; algorithm=policy_gradient has more of them"
            found.lost.append((f"algorithm.{name}={value}", why))


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_yaml(framework: Framework, found: Translation) -> str:
    """The recipe as text."""
    head = f"description: Translated from {framework.name}; see docs/coming_from.md for what differs.\n"
    return head + str(OmegaConf.to_yaml(found.recipe))


def read(path: str) -> dict[str, Any]:
    """Read a file's keys, flat. Raises `ConfigError`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    if file.suffix in (".yaml", ".yml"):
        found = plain(read_yaml(file))
        return dict(_flat(found)) if isinstance(found, Mapping) else {}
    read_ones = [_keys_of(words, file.parent) for words in commands_of(file.read_text(encoding="utf-8"), os.environ)]
    trains = [keys for keys in read_ones if any(framework.is_of(keys) for framework in frameworks())]
    return max(trains or read_ones, key=len, default={})


def keys_of(words: Sequence[str]) -> dict[str, Any]:
    """The keys of words `key=value`, `--key value` and `--key value value`."""
    found: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, given, value = word[2:].partition("=")
            key = key.replace("-", "_")
            found[key], key = (_value(value), "") if given else (True, key)
        elif re.fullmatch(r"-[A-Za-z]+", word):
            key = ""
        elif match := WORD.fullmatch(word):
            found[match[1]], key = _value(match[2]), ""
        elif key:
            value = _value(word.rstrip(","))
            found[key] = value if found[key] is True else [*_as_list(found[key]), value]
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _keys_of(words: list[str], directory: Path) -> dict[str, Any]:
    """The keys of a command: of what follows the program, the file of its --config, and the launcher's processes."""
    place = _program_of(words)
    launcher, own = keys_of(words[: max(0, place - 1)]), keys_of(words[place:])
    processes = {"num_processes": launcher[key] for key in launcher if key in PROCESSES}  # noqa: B035 - of several names
    config = directory / Path(str(own.get("config", ""))).expanduser()
    if config.suffix in (".yaml", ".yml") and config.is_file():
        own = read(str(config)) | {key: value for key, value in own.items() if key != "config"}
    return processes | own


def _program_of(words: list[str]) -> int:
    """Place behind the program that a command starts, and not its launcher; 0 where none is found."""
    for place, word in enumerate(words):
        is_module = place > 0 and words[place - 1] == "-m" and word not in LAUNCHERS
        is_command = word == "trl" or (place > 0 and words[place - 1] == "trl")
        if is_module or (is_command and word != "trl") or (word.endswith(".py") and "=" not in word):
            return place + 1
    return 0


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _value(text: str) -> Any:
    return None if text == "None" else plain(Plain(text.strip()))


def show(path: str, console: Console, target: str | None = None, words: Sequence[str] = ()) -> int:
    """Print the recipe, or write it to the file `target`, and say what was not translated and whether the recipe can
    start. `words`: more of their keys. Returns the exit code. Raises `ConfigError`."""
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    framework, found = translated(read(path) | keys_of(words))
    recipe = as_yaml(framework, found)
    if target is None:
        say(recipe, end="")
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(recipe, encoding="utf-8")
        say(f"{len(found.became)} keys of {framework.name} are in {target}")
    if found.assumed:
        said = ", ".join(f"{key}={value}" for key, value in found.assumed.items())
        say(f"\nnot said there, and taken: {said}")
    if found.lost:
        console.print(f"\n[yellow]not translated[/], {len(found.lost)} keys:", highlight=False)
    for key, why in found.lost:
        console.print(f"  [bold]{key}[/]: ", end="", highlight=False)
        say(why)
    console.print()
    try:
        said = check(recipe)
    except PenstockError as error:
        console.print("[red]the recipe does not start yet[/]: ", end="", highlight=False)
        say(str(error))
        return error.exit_code
    where = "DIRECTORY" if target is None else Path(target).parent
    say(f"checked: {said}. `penstock validate recipe={where}` checks its model, data and machine.")
    return 0


def check(recipe: str) -> str:
    """What the run of a recipe would reserve. Raises `PenstockError` for one that cannot start anywhere."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        try:
            config = load_config([f"recipe={directory}"])
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{directory}/", "")) from None
    if config.data.path is None and not config.data.mixture:
        raise ConfigError("data.path: the recipe names no data. Set it to the rows that are trained on.")
    plan = resolve(config).plan
    cpus, gpus = needed(plan)
    return f"the recipe's keys fit together, and its {len(plan)} actors reserve {cpus:g} CPU(s) and {gpus:g} GPU(s)"
