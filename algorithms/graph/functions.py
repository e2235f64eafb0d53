"""Functions of a dataflow's stages: the columns that they read, by the names of their parameters, and their own names.
One of them comes with the graph, `pair_responses`.

Imports no torch, since the graph of a dataflow is built without it.

Legend: G samples of one group, two here; T_i tokens of a response.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
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


def name_of(function: object, otherwise: str) -> str:
    """The name of a function, in graphs and in messages: its own, or that of the function that a `functools.partial`
    binds."""
    return str(getattr(getattr(function, "func", function), "__name__", otherwise))


def pair_responses(chosen_ids: Sequence[T], rejected_ids: Sequence[T]) -> tuple[list[T], list[float]]:
    """Convert a dataset's pair of responses to two samples of one group, the first stage of `Dataflow.preferences`: the
    chosen response is sample 0, the rejected one sample 1. Returns `response_ids`, two `[T_i]`, and `preferred` `[G]`,
    +1 and -1. Each of the arguments has the same tokens G times, since the source writes them for the group."""
    return [chosen_ids[0], rejected_ids[0]], [1.0, -1.0]
