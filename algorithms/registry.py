"""Algorithms by name, for recipes: `@algorithm("grpo")` puts them here, `catalogue.py` finds them.

A user's own, in any file that the recipe imports (or `algorithm=my_file.py:my_algo`):

    @dataclass
    class MyConfig(AlgorithmConfig):
        name: str = "mine"
        group_size: int = 4

    @algorithm("mine")
    def mine(cfg: MyConfig) -> Dataflow: ...
"""

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.algorithms import AlgorithmConfig
from penstock.conf.errors import ConfigError

Builder = Callable[[Any], Dataflow]
F = TypeVar("F", bound=Builder)


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
