"""Makes one checked `RunConfig` of words of the command line.

    defaults (conf/*.py)  <  model preset of the recipe  <  recipe.yaml  <  model=PRESET  <  key=value words

Hydra composes the config groups (`algorithm`, `model`, `recipe`) over the dataclasses; the result is turned into
objects once, here. Every fault is a `ConfigError` of one sentence.
"""

import glob
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from penstock.conf.algorithms import AlgorithmConfig, known_algorithms
from penstock.conf.checks import AUTO
from penstock.conf.errors import ConfigError, suggest
from penstock.conf.model import MODEL_PRESETS
from penstock.conf.run import PLANNED, RunConfig, validate
from penstock.orchestrator.configuration.large_models import LARGE, count_parameters, refuse_cpus, use_gpus
from penstock.orchestrator.configuration.overrides import (
    CHOICES,
    Override,
    Schema,
    apply,
    parse,
    unresolved,
    wrong_type,
)
from penstock.orchestrator.configuration.recipes import GPUS, Recipe, find_recipe, load_file, own_keys
from penstock.orchestrator.configuration.values import literal
from penstock.workers.prompts.data_names import has_splits, names_files, names_split
from penstock.workers.user_code import with_file

DEFAULT_ALGORITHM = "grpo"
OPTIONS_OF = {"reward.function": "reward.options", "environment.name": "environment.options"}
"""Keys that name something of a recipe's, and those of its options."""
_TREES: dict[tuple[Any, ...], DictConfig] = {}
"""What Hydra has composed, by what it was composed of: it takes 50 ms each time, a copy 6."""
_GIVEN = "_given"
"""Attribute of a configuration with the keys that were given, and the values of those that `plan=auto` may choose."""
_LOG = logging.getLogger("penstock")


A = TypeVar("A", bound=AlgorithmConfig)
if TYPE_CHECKING:

    class RunConfigOf(RunConfig, Generic[A]):
        """A run's configuration whose algorithm has a class of the caller's own."""

        algorithm: A


@overload
def load_config(overrides: Sequence[str] = ()) -> RunConfig: ...


@overload
def load_config(overrides: Sequence[str] = (), *, algorithm: type[A]) -> "RunConfigOf[A]": ...


def load_config(overrides: Sequence[str] = (), *, algorithm: type[AlgorithmConfig] | None = None) -> RunConfig:
    """The resolved and checked configuration of `penstock run <overrides>`. `algorithm`: the class that
    `config.algorithm` is to have, one's own.

    Raises `ConfigError` for an unknown key, name or recipe (with the nearest one), a wrong type, a value out of range
    and sections that contradict each other. Files named by `imports` or `algorithm=file.py:name` are imported.
    """
    return compose_run(parse(overrides), algorithm)


def compose_run(words: list[Override], algorithm: type[AlgorithmConfig] | None = None) -> RunConfig:
    """The configuration of these settings, as `load_config` makes it of words."""
    choices = _choices(words)
    assignments = [word for word in words if word.key not in choices]
    recipe = find_recipe(choices["recipe"]) if "recipe" in choices else Recipe("run", Path.cwd(), {})
    files = _load_imports(recipe, assignments)
    name, config_class = _find_algorithm(choices.get("algorithm"), recipe, files)
    if algorithm is not None and algorithm.name != name:
        raise ConfigError(f"algorithm={name}: {algorithm.__name__} is that of {algorithm.name!r}.")
    config_class = algorithm or config_class
    tree = _composed(recipe, name, config_class, choices)
    _leave_options(tree, assignments)
    for word in assignments:
        apply(tree, word, Schema(config_class))
    num_parameters = _parameters_of_path(recipe, choices, assignments)
    if is_large := num_parameters > LARGE:
        use_gpus(tree, {} if "model" in choices else recipe.values, {word.key for word in assignments})
    tree.imports = [str(file) for file in files]
    try:
        config = cast(RunConfig, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        raise unresolved(error) from None
    if is_large:
        refuse_cpus(config, num_parameters)
    _infer_source(config, {word.key for word in words})
    make_paths_absolute(config, recipe.directory)
    validate(config)
    vars(config)[_GIVEN] = own_keys(recipe).union(word.key for word in words), _planned_values(config)
    return config


def restore_config(values: Mapping[str, Any]) -> RunConfig:
    """The configuration of which `to_yaml` has written these values. Raises `ConfigError`, also for those of a version
    with other keys."""
    section = values.get("algorithm")
    name = str(section.get("name")) if isinstance(section, Mapping) else DEFAULT_ALGORITHM
    for file in values.get("imports") or ():
        load_file(Path(file), "imports")
    if name not in known_algorithms():
        raise ConfigError(f"algorithm={name}: unknown{suggest(name, known_algorithms())}")
    tree = OmegaConf.structured(RunConfig)
    tree.algorithm = OmegaConf.structured(known_algorithms()[name])
    try:
        config = cast(RunConfig, OmegaConf.to_object(OmegaConf.merge(tree, values)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"a configuration of another version of Penstock: {error}") from None
    validate(config)
    return config


def given_keys(config: RunConfig) -> frozenset[str]:
    """Keys that the user has set: words, a recipe of one's own, and those that `plan=auto` chooses where a program has
    changed them since. Of a configuration that was made in Python these are all that differ from the defaults, but for
    a whole GPU of each actor: it says no more than that the run is for GPUs."""
    keys, loaded = vars(config).get(_GIVEN) or (frozenset(), _planned_values(RunConfig()))
    changed = {key: value for key, value in _planned_values(config).items() if value != loaded[key]}
    return frozenset(keys) | {key for key, value in changed.items() if not (key in GPUS and value == 1)}


def _planned_values(config: RunConfig) -> dict[str, Any]:
    return {key: deepcopy(attrgetter(key)(config)) for key in PLANNED}


def _choices(words: list[Override]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for word in words:
        if word.key in CHOICES:
            if isinstance(literal(word.value), dict | list):
                raise ConfigError(f"{word.text}: {word.key}= takes a name. Set single keys as {word.key}.key=value.")
            chosen[word.key] = str(word.value).strip()
    return chosen


def _load_imports(recipe: Recipe, assignments: list[Override]) -> list[Path]:
    files = recipe.imports
    for word in assignments:
        if word.key == "imports":
            value = literal(word.value) if isinstance(word.value, str) else word.value
            names = value if isinstance(value, list) else [value]
            files += [Path(str(name)).expanduser().resolve() for name in names]
    files = list(dict.fromkeys(files))
    for file in files:
        load_file(file, "imports")
    return files


def _find_algorithm(choice: str | None, recipe: Recipe, files: list[Path]) -> tuple[str, type[AlgorithmConfig]]:
    """Name and config class of the chosen algorithm. `file.py:name` loads the file, and `files` then holds it."""
    section = recipe.values.get("algorithm")
    written = section.get("name") if isinstance(section, dict) else section
    name = choice or str(written or DEFAULT_ALGORITHM)
    if ".py:" in name:
        base = Path.cwd() if choice else recipe.directory
        name = _load_algorithm(name, base, files)
    known = known_algorithms()
    if name not in known:
        raise ConfigError(
            f"algorithm={name}: unknown{suggest(name, known)} One's own: algorithm=my_file.py:my_algorithm."
        )
    return name, known[name]


def _load_algorithm(name: str, base: Path, files: list[Path]) -> str:
    """Import the file of `file.py:name`, and register the function if it has not done so itself. Returns the
    registered name."""
    from penstock.algorithms.catalogue import ALGORITHMS
    from penstock.algorithms.registry import algorithm

    file_name, _, function_name = name.rpartition(":")
    path = (base / Path(file_name).expanduser()).resolve()
    module = load_file(path, "algorithm")
    if path not in files:
        files.append(path)
    build = getattr(module, function_name, None)
    for entry in ALGORITHMS.values():
        if entry.build is build or (entry.name == function_name and entry.build.__module__ == module.__name__):
            return entry.name
    if not callable(build):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"algorithm={name}: {path} defines no {function_name!r}{suggest(function_name, functions)}")
    algorithm(function_name)(build)
    return function_name


def _parameters_of_path(recipe: Recipe, choices: dict[str, str], assignments: list[Override]) -> float:
    """Parameters of the model that `model.path` names, by a word or by a recipe whose model no choice replaces; 0: no
    model is named so, or its size is not known."""
    section = None if "model" in choices else recipe.values.get("model")
    paths = [section.get("path")] if isinstance(section, dict) else []
    paths += [word.value for word in assignments if word.key == "model.path"]
    return (count_parameters(str(paths[-1]), recipe.directory) or 0) if paths and paths[-1] else 0


def _composed(
    recipe: Recipe, algorithm: str, config_class: type[AlgorithmConfig], choices: dict[str, str]
) -> DictConfig:
    key = (config_class, algorithm, recipe.name, recipe.directory, repr(recipe.values), tuple(choices.items()))
    if key not in _TREES:
        _TREES[key] = _compose_groups(recipe, algorithm, config_class, choices)
    return deepcopy(_TREES[key])


def _compose_groups(
    recipe: Recipe, algorithm: str, config_class: type[AlgorithmConfig], choices: dict[str, str]
) -> DictConfig:
    written, preset = _recipe_values(recipe, config_class, algorithm_replaced="algorithm" in choices)
    values = Schema(config_class).fit(written, f"{recipe.file}: ")
    store = ConfigStore.instance()
    if "penstock_schema.yaml" not in store.repo:  # a tenth of a second, each time
        store.store(name="penstock_schema", node=RunConfig)
    store.store(group="algorithm", name="chosen", node=config_class)
    defaults: list[Any] = ["penstock_schema", {"algorithm": "chosen"}]
    if preset:
        defaults.append({"model": _store_preset(preset, "model")})
    defaults.append({"recipe": "chosen"})
    if "model" in choices:
        defaults.append({"model_choice": _store_preset(choices["model"], "model_choice")})
    name = choices.get("recipe")
    packaged = name is None or not Path(name).exists() or recipe.name == name
    main = {"recipe": name if packaged else str(recipe.directory), "algorithm": {"name": algorithm}}
    store.store(name="penstock_run", node={"defaults": [*defaults, "_self_"], **main})
    backup = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # a program that runs under Hydra itself may call us
    try:
        store.store(group="recipe", name="chosen", node=values, package="_global_")
        with initialize(version_base=None, config_path=None, job_name="penstock"):
            tree = compose("penstock_run")
    except (HydraException, OmegaConfBaseException):
        _refuse(recipe, values, config_class)
        raise
    finally:
        GlobalHydra.instance().hydra = backup
    return tree


def _store_preset(name: str, group: str) -> str:
    if name not in MODEL_PRESETS:
        raise ConfigError(
            f"model={name}: unknown preset{suggest(name, MODEL_PRESETS)} "
            f"For a model directory or hub id use model.path={name}."
        )
    ConfigStore.instance().store(group=group, name=name, node=MODEL_PRESETS[name], package="_global_")
    return name


def _recipe_values(
    recipe: Recipe, config_class: type[AlgorithmConfig], *, algorithm_replaced: bool
) -> tuple[dict[str, Any], str | None]:
    """The recipe's keys as Hydra takes them, and its model preset.

    With `algorithm=` on the command line the recipe's settings of its own algorithm stay where the new one has the
    same key.
    """
    values = {key: value for key, value in recipe.values.items() if value is not None and key != "imports"}
    section = values.pop("algorithm", None)
    settings = {k: v for k, v in section.items() if k != "name"} if isinstance(section, dict) else {}
    if algorithm_replaced:
        known = {field.name for field in fields(config_class)}
        settings = {key: value for key, value in settings.items() if key in known}
    if settings:
        values["algorithm"] = settings
    model = values.pop("model", None)
    if isinstance(model, str):
        return values, str(model)
    preset = None
    if isinstance(model, dict):
        preset = model.get("preset")
        values["model"] = {key: value for key, value in model.items() if key != "preset"}
    return values, None if preset is None else str(preset)


def _refuse(recipe: Recipe, values: dict[str, Any], config_class: type[AlgorithmConfig]) -> None:
    """Raise `ConfigError` for a wrong type of the YAML, with its file name: Hydra does not name it."""
    tree = OmegaConf.structured(RunConfig)
    tree.algorithm = OmegaConf.structured(config_class)
    try:
        OmegaConf.merge(tree, values)
    except OmegaConfBaseException as error:
        key, value = str(error.full_key), cast(Any, values)
        for part in key.partition("[")[0].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        raise wrong_type(tree, error, key, value, f"{recipe.file}: ") from None


def _leave_options(tree: DictConfig, assignments: list[Override]) -> None:
    """Empty the recipe's options of what is replaced: they are another function's."""
    for word in assignments:
        if word.key in OPTIONS_OF and OmegaConf.select(tree, word.key) not in (None, word.value):
            OmegaConf.update(tree, OPTIONS_OF[word.key], {}, merge=False)


def _infer_source(config: RunConfig, typed: set[str]) -> None:
    """Make a recipe of another source read files, if `data.path=train.csv` alone was given. What the recipe holds out,
    and its teachers, are for its own problems."""
    data, path = config.data, config.data.path or ""
    is_of_hub = data.source == "huggingface"
    may_be_files = is_of_hub or ("data.path" in typed and not re.fullmatch(r"\w+", path))
    if "data.source" in typed or data.source in (AUTO, "jsonl") or not may_be_files or not names_files(path):
        return
    data.source = AUTO
    if is_of_hub and has_splits(path):
        return
    data.subset = None
    for key in {"teacher", "rejected_teacher"} - {name.removeprefix("data.") for name in typed}:
        setattr(data, key, None)
    if config.evaluation.every_steps and "evaluation.path" not in typed:
        config.evaluation.path, config.evaluation.every_steps = None, 0
        _LOG.warning(
            "data.path names files: held-out evaluation is off. Name a held-out file: evaluation.path=test.jsonl"
        )


def make_paths_absolute(config: RunConfig, directory: Path) -> None:
    """Give files and directories that exist their absolute path, since actors run elsewhere. Names of the hub stay as
    they are. `directory`: searched after the working directory."""

    def absolute(value: str | None) -> str | None:
        if not value:
            return value
        candidates = (base / Path(value).expanduser() for base in (Path.cwd(), directory))
        return next((str(path.resolve()) for path in candidates if path.exists() or any(matches(path))), value)

    def matches(pattern: Path) -> Iterator[str]:
        return glob.iglob(str(pattern), recursive=True)

    parts: list[Any] = [config.data, *config.data.mixture.values()]
    for data in parts:
        if (data.source or config.data.source) != "reasoning_gym":
            data.path = absolute(data.path)
    if config.data.kind in (AUTO, "jsonl", "huggingface"):
        trained = next((str(part.path) for part in config.data.mixture.values()), config.data.path or "")
        measured: list[Any] = [config.evaluation, *config.evaluation.sets.values()]
        for held_out in measured:
            if held_out.path and not names_split(held_out.path, trained):
                held_out.path = absolute(held_out.path)
    config.model.path = absolute(config.model.path)
    config.model.reference_path = absolute(config.model.reference_path)
    config.model.paths = {name: absolute(path) or path for name, path in config.model.paths.items()}
    for section, key in (
        (config.reward, "function"), (config.data, "teacher"), (config.data, "rejected_teacher"),
        (config.data, "path"), (config.evaluation, "path"), (config.environment, "name"),
        *((part, "path") for part in config.data.mixture.values()),
    ):  # fmt: skip
        setattr(section, key, _of_code(getattr(section, key), absolute))
    for reward in config.rewards:
        reward.function = _of_code(reward.function, absolute) or reward.function
    options = config.environment.options
    options |= {key: _of_code(value, absolute) for key, value in options.items() if isinstance(value, str)}


def _of_code(name: str | None, absolute: Callable[[str], str | None]) -> str | None:
    """The name of a function: `file.py:function` with the file's absolute path; anything else as it is."""
    return with_file(name, absolute) if name else name
