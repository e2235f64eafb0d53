"""The columns that a function reads, by the names of its parameters: stages of a dataflow find their columns so."""

import inspect
from collections.abc import Callable
from typing import Any

from penstock.algorithms.function_names import name_of

Function = Callable[..., Any]
GROUP_IDS = "group_ids"
"""A parameter that is no column: a function that has it gets the ids of groups."""


def columns_read(function: Function) -> list[str]:
    """Parameters without a default: the columns that a `compute` or `filter` stage must read for the function."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.name != GROUP_IDS]


class Renamed:
    """The function, with one parameter under the name of another column. Pickles where the function does.

    >>> columns_read(Renamed(lambda reward: reward, "reward", "shaped_reward"))
    ['shaped_reward']
    """

    def __init__(self, function: Function, parameter: str, column: str) -> None:
        self.function, self.parameter, self.column = function, parameter, column
        self.__name__ = name_of(function, "compute")

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.function)
        parameters = signature.parameters.values()
        return signature.replace(
            parameters=[p.replace(name=self.column) if p.name == self.parameter else p for p in parameters]
        )

    def __call__(self, **arguments: Any) -> Any:
        arguments[self.parameter] = arguments.pop(self.column)
        return self.function(**arguments)
