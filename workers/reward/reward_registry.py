"""The lookup of reward functions: by a registered name, in a file, or in a module; or a callable is given.

`RewardSpec` is sent between processes. It is made where the run is composed (`RewardSpec.of(...).check()`); each child
process of the pool resolves it anew. Functions of files are imported there, callables are sent by cloudpickle.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from penstock.conf.data import ColumnsConfig
from penstock.conf.errors import ConfigError, suggest
from penstock.conf.reward import ENVIRONMENT_REWARD
from penstock.conf.secret import reveal
from penstock.workers.reward.signatures import HELP, Caller, LogMetric, RewardFunction, adapt, name_of
from penstock.workers.user_code import InlineValue, absolute, find_function, import_file, with_file

F = TypeVar("F", bound=Callable[..., Any])

BUILTIN_MODULES = ("penstock.workers.reward.functions", "penstock.workers.reward.code", "penstock.workers.reward.judge")
ANSWER = ("answer", "ground_truth")
"""Parameters that get the row's answer."""


@dataclass(frozen=True)
class RewardEntry:
    function: Callable[..., Any]
    warm: Callable[[Mapping[str, Any]], object] | None = None


REWARDS: dict[str, RewardEntry] = {}


def reward(name: str, *, warm: Callable[[Mapping[str, Any]], object] | None = None) -> Callable[[F], F]:
    """Register a reward function under a name. `warm` runs once in each process, before its first sample, with the
    function's options."""

    def register(function: F) -> F:
        REWARDS[name] = RewardEntry(function, warm)
        return function

    return register


def find_reward(spec: str) -> Callable[..., Any]:
    """The function that `reward.function` names: registered, `file.py:function` or `package.module:function`.

    Raises `ConfigError` with the nearest known name, or with what the import of the file raised.
    """
    if isinstance(spec, InlineValue):
        return cast(Callable[..., Any], spec.value)
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

    function: str
    """Name of the function, or an `InlineValue`."""
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
            if not callable(function):
                raise ConfigError(f"reward: {function!r} is no function. {HELP}")
            return cls(InlineValue(name_of(function), function), bound)
        if function in REWARDS and not REWARDS[function].function.__module__.startswith("penstock."):
            return cls(InlineValue(function, REWARDS[function].function), bound)
        return cls(with_file(function, absolute), options=bound, imports=files)

    def resolve(self, log_metric: LogMetric = lambda name, value: None) -> RewardFunction:
        """Import what is named and adapt it. Raises `ConfigError`."""
        for path in self.imports:
            import_file(path, "imports")
        caller, options = Caller(self.with_thinking, self.max_steps, log_metric), reveal(self.options)
        return adapt(find_reward(self.function), options, caller)

    def warm(self) -> None:
        """Do what the function's registration asks for before the first sample: slow imports, mostly."""
        registered = REWARDS.get(self.function)
        if registered is not None and registered.warm is not None:
            registered.warm(reveal(self.options))

    def check(self) -> None:
        """Raise `ConfigError` unless the function is found and has a known signature."""
        self.resolve()


def needs_answer(function: str | Callable[..., Any], options: Mapping[str, Any], column: str | None) -> bool:
    """Return whether a reward asks for the answer, by a parameter without a default or in a judge's rubric. `column`:
    that of the answer, which a function of TRL's names. Raises `ConfigError` for one that is not found."""
    if function == ENVIRONMENT_REWARD:
        return False
    if "{answer}" in str(options.get("rubric", "")):
        return True
    try:
        parameters = inspect.signature(find_reward(function) if isinstance(function, str) else function).parameters
    except (TypeError, ValueError):  # a builtin, which `adapt` refuses
        return False
    columns = (column, "solution") if column == ColumnsConfig.answer else (column,)  # as rows of TRL's datasets call it
    asked = [name for name in (*ANSWER, *columns) if name in parameters and name not in options]
    return any(parameters[name].default is inspect.Parameter.empty for name in asked if name is not None)
