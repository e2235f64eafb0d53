"""Recipes: directories with a `recipe.yaml` with the differences from the defaults, and the Python files of recipes and
users. They are found and loaded here, and composed in `compose.py`.

    recipe=arithmetic          a directory of the package `penstock.recipes`
    recipe=path/to/directory   any other one, or its YAML file

A recipe may say `base: NAME` and then only what differs from that one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.conf.errors import ConfigError, suggest
from penstock.conf.renamed import present_values
from penstock.orchestrator.configuration.values import Plain, duplicate_key_error, read_yaml
from penstock.workers.user_code import RECIPE_FILE, import_file, packaged_recipes

FREE = ("options", "tags", "labels")
"""Names of mappings with keys of the user's own, which may have dots in them."""
GPUS, WHOLE = ("rollout.num_gpus_per_worker", "trainer.num_gpus_per_rank"), ("1", "1.0")


@dataclass(frozen=True)
class Recipe:
    """A recipe as written. `values` holds keys of `RunConfig`, with texts that no type has been given to (`values.py`);
    `directory` is what its relative paths are relative to."""

    name: str
    directory: Path
    values: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.directory / RECIPE_FILE

    @property
    def description(self) -> str:
        return str(self.values.get("description", ""))

    @property
    def imports(self) -> list[Path]:
        """The recipe's Python files, absolute."""
        names = self.values.get("imports") or []
        if not isinstance(names, list):
            raise ConfigError(f"{self.file}: imports={names!r} must be a list of Python files.")
        return [(self.directory / str(name)).resolve() for name in names]


def find_recipe(name: str) -> Recipe:
    """The recipe of that name or at that path. Raises `ConfigError` with the nearest known name, or the YAML's fault
    and line."""
    path = Path(name).expanduser()
    known = packaged_recipes()
    if name in known:
        directory = known[name]
    elif path.name == RECIPE_FILE and path.is_file():
        directory = path.resolve().parent
    elif (path / RECIPE_FILE).is_file():
        directory = path.resolve()
    elif path.is_dir():
        raise ConfigError(
            f"recipe={name}: the directory has no {RECIPE_FILE}. Write one; keys are those of `penstock validate`."
        )
    elif path.is_file():
        raise ConfigError(
            f"recipe={name}: is a file, and a recipe is a directory: `mkdir {path.stem} && mv {name} "
            f"{path.stem}/{RECIPE_FILE}`, then recipe={path.stem}."
        )
    else:
        raise ConfigError(f"recipe={name}: neither a recipe nor a directory with a {RECIPE_FILE}{suggest(name, known)}")
    return Recipe(directory.name, directory, _with_base(directory, _read(directory / RECIPE_FILE)))


def own_keys(recipe: Recipe) -> frozenset[str]:
    """Dotted keys that a recipe which is not packaged sets itself, beside those of its base. That each actor has whole
    GPUs says no more than that the run is for GPUs."""
    packaged = {directory.resolve() for directory in packaged_recipes().values()}
    if recipe.directory.resolve() in packaged or not recipe.file.is_file():
        return frozenset()
    return frozenset(key for key, value in _flat(_read(recipe.file)) if not (key in GPUS and str(value) in WHOLE))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_file(path: Path, key: str) -> ModuleType:
    """The module of a user's file; the same file gives the same module. It is pickled by value, so that
    what it defines reaches every actor. Reward processes import the same files by their path (`workers/user_code.py`).
    Raises `ConfigError` naming `key` and the fault."""
    module = import_file(str(path), key)
    from ray import cloudpickle  # late: takes half a second, and most runs have no such file

    # Actors run elsewhere and cannot import a user's file by its name; its functions travel as code.
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def _with_base(directory: Path, values: dict[str, Any], seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values merged over those of the recipe that `base` names. An `algorithm` section of another name replaces the
    base's."""
    if "base" not in values:
        return values
    if directory in seen:
        raise ConfigError(f"{directory / RECIPE_FILE}: base={values['base']} leads back to this recipe.")
    known = packaged_recipes()
    name = str(values["base"])
    where = known[name] if name in known else (directory / name).resolve()
    if not (where / RECIPE_FILE).is_file():
        raise ConfigError(f"{directory / RECIPE_FILE}: base={name} is no recipe{suggest(name, known)}")
    base = _with_base(where, _read(where / RECIPE_FILE), (*seen, directory))
    own = {key: value for key, value in values.items() if key != "base"}
    if own.get("algorithm", {}).get("name") not in (None, base.get("algorithm", {}).get("name")):
        base = {key: value for key, value in base.items() if key != "algorithm"}
    return _merged(base, own)


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], own[key]) for key in base if isinstance(base[key], dict)
            and isinstance(own.get(key), dict)}  # fmt: skip
    return {**base, **own, **both}


def _read(file: Path) -> dict[str, Any]:
    values = read_yaml(file)
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file}: must hold `key: value` lines at its top, not a {type(values).__name__}.")
    return present_values(_expand(values, file))


def _expand(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """Expand dotted keys: `trainer.max_steps: 5` is the same as the nested form; both may be mixed. Raises
    `ConfigError` for a key to which both forms give a value."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = str(key).split(".")
        is_free = leaf in FREE or any(parent in FREE for parent in parents)
        nested: Any = _expand(value, file) if isinstance(value, dict) and not is_free else value
        for part in reversed([*parents, leaf]):
            nested = {Plain(part, getattr(key, "line", 0)): nested}
        _merge(result, nested, file)
    return result


def _merge(into: dict[str, Any], values: dict[str, Any], file: Path, path: str = "") -> None:
    for key, value in values.items():
        if key not in into:
            into[key] = value
        elif isinstance(value, dict) and isinstance(into[key], dict):
            _merge(into[key], value, file, f"{path}{key}.")
        else:
            raise duplicate_key_error(file, f"{path}{key}", next(known for known in into if known == key), key)
