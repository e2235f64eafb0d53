"""The lookup of reward functions: by a registered name, in a file, or in a module; or a callable is given.

`RewardSpec` is sent between processes. It is made where the run is composed (`RewardSpec.of(...).check()`); each child
process of the pool resolves it anew. Functions of files are imported there, callables are sent by cloudpickle.
"""

import importlib
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from penstock.conf.errors import ConfigError, suggest
from penstock.conf.secret import reveal
from penstock.workers.reward.signatures import HELP, Caller, LogMetric, RewardFunction, adapt, name_of
from penstock.workers.user_code import absolute, find_function, import_file, with_file

F = TypeVar("F", bound=Callable[..., Any])

BUILTIN_MODULES = ("penstock.workers.reward.functions", "penstock.workers.reward.code", "penstock.workers.reward.judge")


@dataclass(frozen=True)
class Registered:
    function: Callable[..., Any]
    warm: Callable[[Mapping[str, Any]], object] | None = None


REWARDS: dict[str, Registered] = {}


def reward(name: str, *, warm: Callable[[Mapping[str, Any]], object] | None = None) -> Callable[[F], F]:
    """Register a reward function under a name. `warm` runs once in each process, before its first sample, with the
    function's options."""

    def register(function: F) -> F:
        REWARDS[name] = Registered(function, warm)
        return function

    return register


def find_reward(spec: str) -> Callable[..., Any]:
    """The function that `reward.function` names: registered, `file.py:function` or `package.module:function`.

    Raises `ConfigError` with the nearest known name, or with what the import of the file raised.
    """
    for module in BUILTIN_MODULES:
        importlib.import_module(module)
    if spec in REWARDS:
        return REWARDS[spec].function
    if ":" not in spec:
        raise ConfigError(
            f"reward.function={spec}: no reward is registered under this name{suggest(spec, REWARDS)} "
            "A function of your own is `file.py:function` or `package.module:function`."
        )
    return find_function(spec, "reward.function")


@dataclass(frozen=True)
class RewardSpec:
    """A reward function and its options, in a form that any process can resolve."""

    function: str = ""
    pickled: bytes = b""
    """A callable by cloudpickle, instead of `function`."""
    options: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    """Files that are run before the function is looked up: those that register rewards (`imports` of the run), or that
    have the classes of what is scored."""
    with_thinking: bool | None = None
    """`reward.with_thinking`."""
    max_steps: int = 0
    """Steps of the run, for functions that ask."""

    @classmethod
    def of(
        cls, function: str | Callable[..., Any], options: dict[str, Any] | None = None, imports: tuple[str, ...] = ()
    ) -> "RewardSpec":
        """Make a specification of what `reward.function` names, or of a callable.

        Call it where the user's files are loaded and relative paths mean something: a path is made absolute here, and a
        function that a user's file has registered is sent as code.
        """
        bound = dict(options or {})
        files = tuple(absolute(path) for path in imports)
        if not isinstance(function, str):
            return cls(pickled=_pickled(function), options=bound)
        if function in REWARDS and not REWARDS[function].function.__module__.startswith("penstock."):
            return cls(function, _pickled(REWARDS[function].function), bound)
        return cls(with_file(function, absolute), options=bound, imports=files)

    def resolve(self, log_metric: LogMetric = lambda name, value: None) -> RewardFunction:
        """Import what is named and adapt it. Raises `ConfigError`."""
        for path in self.imports:
            import_file(path, "imports")
        caller, options = Caller(self.with_thinking, self.max_steps, log_metric), reveal(self.options)
        if self.pickled:
            return adapt(importlib.import_module("cloudpickle").loads(self.pickled), options, caller)
        return adapt(find_reward(self.function), options, caller)

    def warm(self) -> None:
        """Do what the function's registration asks for before the first sample: slow imports, mostly."""
        registered = REWARDS.get(self.function)
        if registered is not None and registered.warm is not None:
            registered.warm(reveal(self.options))

    def check(self) -> None:
        """Raise `ConfigError` unless the function is found and has a known signature."""
        self.resolve()


def _pickled(function: Callable[..., Any]) -> bytes:
    """The function pickled: by value where its module is the user's own, which another process may not find; else by
    reference."""
    if not callable(function):
        raise ConfigError(f"reward: {function!r} is no function. {HELP}")
    cloudpickle = importlib.import_module("cloudpickle")
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    if module is None or module.__name__ == "__main__" or _is_installed(module):
        return bytes(cloudpickle.dumps(function))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    except (TypeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"reward: {module.__name__}.{name_of(function)} cannot be sent to the reward processes: {error}. "
            "Name it as `file.py:function` instead, so that each process imports it."
        ) from error
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or module.__name__.startswith("penstock.") or "site-packages" in Path(file).parts
