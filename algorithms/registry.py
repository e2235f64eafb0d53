"""What is registered by name: algorithms, and the formulas of one's own that a configuration names.

    @dataclass
    class MyConfig(AlgorithmConfig):
        name: str = "mine"
        group_size: int = 4

    @algorithm("mine")                                          # in any file that the recipe imports, or
    def mine(cfg: MyConfig) -> Dataflow: ...                    # algorithm=my_file.py:mine

    SURROGATES = FormulaRegistry("algorithm.surrogate")
    surrogate = SURROGATES.register

    @surrogate("mine")
    def mine(new, old, advantage, mask, *, clip: NonNegative = 0.2, temperature: Positive = 1.0): ...

    checked_options(SURROGATES.find("mine"), {"clip": -1}, "algorithm.surrogate_options")
    # ConfigError: algorithm.surrogate_options.clip=-1: must be a finite number, at least 0.

A formula declares its settings as keyword-only parameters with a type, and its limits in the type. A wrong option can
so be refused before a run starts. `catalogue.py` finds algorithms.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Annotated, Any, TypeVar

from penstock.algorithms.checks import non_negative, positive
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.algorithms import AlgorithmConfig
from penstock.conf.errors import ConfigError, suggest

Builder = Callable[[Any], Dataflow]
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True)
class Algorithm:
    """A named builder of dataflows, with the dataclass that configures it."""

    name: str
    build: Builder
    config_class: type[AlgorithmConfig]


ALGORITHMS: dict[str, Algorithm] = {}


def algorithm(name: str) -> Callable[[F], F]:
    """Register a function `(config) -> Dataflow`. The annotation of its one parameter is the configuration's class."""

    def register(build: F) -> F:
        ALGORITHMS[name] = Algorithm(name, build, _config_class(name, build))
        return build

    return register


def _config_class(name: str, build: Builder) -> type[AlgorithmConfig]:
    parameters = list(inspect.signature(build).parameters)
    hint = typing.get_type_hints(build).get(parameters[0]) if len(parameters) == 1 else None
    if not (inspect.isclass(hint) and issubclass(hint, AlgorithmConfig)):
        raise ConfigError(
            f"algorithm {name!r}: its function must take one parameter annotated with a dataclass derived from "
            f"AlgorithmConfig, like `def {name}(cfg: MyConfig) -> Dataflow`."
        )
    return hint


Options = Mapping[str, Any]
NO_OPTIONS: Options = MappingProxyType({})


class FormulaRegistry(dict[str, Function]):
    """A mapping of names to functions. `key`: the configuration's key, for messages.

    A name is known where its file has been imported. A process that has not imported a user's file can still run the
    function: `find` takes the function itself in place of its name, and a function travels with the `partial` that
    holds it.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that names a function and returns it as it is. Raises `ConfigError` if another function has the
        name; the same one again (a file that is loaded twice) replaces itself."""

        def put(function: F) -> F:
            there = self.get(name)
            if there is not None and _home(there) != _home(function):
                raise ConfigError(
                    f"{self.key}={name}: {_home(function)} takes a name that {_home(there)} has. Choose another one."
                )
            self[name] = function
            return function

        return put

    def find(self, which: str | Function) -> Function:
        """The function of that name, or the function itself. Raises `ConfigError` with the nearest known name."""
        if callable(which):
            return which
        if which not in self:
            raise ConfigError(f"{self.key}={which}: unknown{suggest(str(which), self)}")
        return self[which]


def _home(function: Function) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


@dataclass(frozen=True)
class Limit:
    """Metadata of an annotated number: `check(key, value)` raises `ConfigError` where the value is out of range."""

    check: Callable[[str, float], None]


NonNegative = Annotated[float, Limit(non_negative)]
"""A number that is finite and at least 0: distances, coefficients, clips."""
Positive = Annotated[float, Limit(positive)]
"""A number that is finite and above 0: temperatures, caps, divisors."""


def checked_options(function: Callable[..., Any], options: Options, key: str) -> dict[str, Any]:
    """The options as a dictionary, each one a keyword-only parameter of the function and of its type.

    An int passes for a float, a bool passes only for a bool. Types other than bool, int, float, str, None and unions
    of them are not looked at, nor are types that cannot be found. Raises `ConfigError` with `key.name`, and the nearest
    name if it is unknown.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    hints = _hints(getattr(function, "func", function))
    for name, value in options.items():
        if name not in names:
            known = suggest(name, names) if names else "; it takes none."
            raise ConfigError(f"{key}.{name}: {_title(function)} has no such option{known}")
        if name in hints:
            _check(f"{key}.{name}", value, hints[name])
    return dict(options)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Type hints of a function. One that was pickled by value leaves behind what only its annotations name, if they are
    strings."""
    try:
        routine = function if inspect.isroutine(function) else type(function).__call__
        return typing.get_type_hints(routine, include_extras=True)
    except NameError:
        return {}


def _check(key: str, value: Any, hint: Any) -> None:
    kinds = typing.get_args(hint) if _is_union(hint) else (hint,)
    for kind in kinds:
        bare, limits = _bare(kind)
        if _fits(value, bare):
            for limit in limits:
                limit.check(key, value)
            return
    expected = " or ".join(getattr(_bare(kind)[0], "__name__", str(kind)).replace("NoneType", "null") for kind in kinds)
    raise ConfigError(f"{key}={value!r}: expected {expected}, not {type(value).__name__}.")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, UnionType)


def _bare(kind: Any) -> tuple[Any, tuple[Limit, ...]]:
    """The type under `Annotated`, and its limits."""
    if typing.get_origin(kind) is Annotated:
        return typing.get_args(kind)[0], tuple(item for item in kind.__metadata__ if isinstance(item, Limit))
    return kind, ()


def _fits(value: Any, bare: Any) -> bool:
    if bare is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if bare is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if bare in (bool, str, type(None)):
        return isinstance(value, bare)
    return True


def _title(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
