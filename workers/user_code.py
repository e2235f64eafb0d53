"""The code that a user brings: a Python file or an importable module, and the function in it that a configuration
names; and the directories of recipes, which bring such files.

It is named by keys that take `file.py:function` or `package.module:function` (`reward.function`, `data.teacher`,
`algorithm`, `imports`), and resolved on the driver and again in every process that needs it. An `InlineValue` in the
place of such a name brings the function itself, as Python programs and notebooks have it.
"""

import hashlib
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from penstock.conf.errors import ConfigError, suggest

RECIPE_FILE = "recipe.yaml"
GIVEN = "given to penstock.train"
"""Mark of an `InlineValue` in the configuration of a run."""


class InlineValue(str):
    """A name in a configuration, with the value that it stands for: a function, or rows. In files it is the name alone;
    other processes get the value with it, by value and in memory."""

    value: Any

    def __new__(cls, name: str, value: Any) -> "InlineValue":
        made = super().__new__(cls, name)
        made.value = value
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _inline_value, (str(self), pickle_by_value(self.value))

    def __deepcopy__(self, memo: Any) -> "InlineValue":
        return self


def _inline_value(name: str, pickled: bytes) -> InlineValue:
    return InlineValue(name, pickle.loads(pickled))


def pickle_by_value(value: Any) -> bytes:
    """The value pickled by cloudpickle; a function of a module that is the user's own by value, as another process may
    not find it. Raises `ConfigError`."""
    cloudpickle = importlib.import_module("cloudpickle")
    inner = getattr(value, "func", value)
    module = sys.modules.get(getattr(inner, "__module__", None) or "__main__")
    is_own = module is not None and module.__name__ != "__main__" and not _is_installed(module)
    if is_own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    except (TypeError, pickle.PicklingError) as error:
        name = getattr(inner, "__name__", type(inner).__name__)
        raise ConfigError(
            f"{name} cannot be sent to other processes: {error}. Name it as `file.py:function` instead, so that each "
            "process imports it."
        ) from error
    finally:
        if is_own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or module.__name__.startswith("penstock.") or "site-packages" in Path(file).parts


def packaged_recipes() -> dict[str, Path]:
    """Directories of the recipes that come with Penstock, by name."""
    found: dict[str, Path] = {}
    package = importlib.util.find_spec("penstock.recipes")
    for root in (package.submodule_search_locations or []) if package else []:
        for file in sorted(Path(root).glob(f"*/{RECIPE_FILE}")):
            found.setdefault(file.parent.name, file.parent)
    return found


def file_of(spec: str) -> str:
    """The file of `file.py:function`, as it is written; empty for another name."""
    place = spec.rpartition(":")[0]
    return place if place.endswith(".py") else ""


def with_file(spec: str, change: Callable[[str], str | None]) -> str:
    """Change the file of `file.py:function`; another name stays as it is."""
    file = file_of(spec)
    return f"{change(file)}:{spec.rpartition(':')[2]}" if file else spec


def absolute(path: str | Path) -> str:
    """The path from the root, by which other processes find a file, whatever directory they work in."""
    return str(Path(path).expanduser().resolve())


def find_function(spec: str, key: str) -> Callable[..., Any]:
    """Find what `file.py:name` or `package.module:name` stands for. Raises `ConfigError`, which names `key`."""
    if isinstance(spec, InlineValue):
        return cast(Callable[..., Any], spec.value)
    place, colon, attribute = spec.rpartition(":")
    if not colon:
        raise ConfigError(f"{key}={spec}: write it as `file.py:function` or `package.module:function`.")
    module = import_file(place, key) if file_of(spec) else _import_module(spec, place, key)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise ConfigError(f"{key}={spec}: {place} has no {attribute!r}{suggest(attribute, names)}")
        found = getattr(found, part)
    return found


def import_file(path: str, key: str) -> ModuleType:
    """Run a Python file as a module, once a process; it may import its neighbours. `ConfigError` names `key`."""
    file = Path(absolute(path))
    if not file.is_file():
        near = sorted(other.name for other in file.parent.glob("*.py")) if file.parent.is_dir() else []
        hint = suggest(file.name, near) if near else "."
        raise ConfigError(f"{key}={path}: there is no file {file}{hint}")
    name = f"penstock_file_{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{key}={path}: not a Python file.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{key}={path}: importing it failed: {type(error).__name__}: {error}") from error
    return module


def _import_module(spec: str, place: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except (ImportError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{key}={spec}: module {place!r} cannot be imported: {error}. "
            "A file is written with its ending, `file.py:function`."
        ) from error
