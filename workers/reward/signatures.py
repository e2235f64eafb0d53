"""A common way to call three kinds of reward functions: Penstock's own, TRL's and verl's, sync or async.

    def reward(response, task): ...                                             # also (response, answer)
    def reward(prompts, completions, **columns) -> list[float]: ...             # TRL: one call scores a batch
    def reward(data_source, solution_str, ground_truth, extra_info=None): ...   # verl: a float, or a dict with "score"

The names of the parameters decide which kind it is. `adapt` is called once per process, and before a run starts.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import ConfigError, suggest

Function = Callable[..., Any]
TaskColumns = dict[str, Any]

HELP = (
    "A reward takes (response, task) or (response, answer); or, as TRL, (prompts, completions, **columns); "
    "or, as verl, (data_source, solution_str, ground_truth, extra_info=None)."
)
Provided = dict[str, Callable[[str, TaskColumns], Any]]
"""Arguments of a function that scores one sample, by parameter: from the response and the task."""
OWN: Provided = {
    "response": lambda response, task: response,
    "task": lambda response, task: task,
    "answer": lambda response, task: task.get("answer"),
    "prompt": lambda response, task: task.get("prompt"),
}
VERL: Provided = {
    "data_source": lambda response, task: task.get("data_source", ""),
    "solution_str": lambda response, task: response,
    "ground_truth": lambda response, task: task.get("answer"),
    "extra_info": lambda response, task: task.get("extra_info", task),
}


@dataclass(frozen=True)
class RewardFunction:
    """A user's function behind one signature. Exactly one of `one` and `many` is set; either may return an awaitable.

    `one(response, task)` scores a sample; `many(responses, tasks)` scores a batch and returns one value a sample.
    """

    name: str
    is_async: bool
    one: Callable[[str, TaskColumns], Any | Awaitable[Any]] | None = None
    many: Callable[[Sequence[str], Sequence[TaskColumns]], Any | Awaitable[Any]] | None = None


def adapt(function: Function, options: dict[str, Any] | None = None) -> RewardFunction:
    """The scorer of a function, with `options` bound as keyword arguments.

    Raises `ConfigError` if its parameters fit none of the signatures, or an option is none of its parameters.
    """
    name = name_of(function)
    if not callable(function):
        raise ConfigError(f"reward.function: {name} is a {type(function).__name__}, which cannot be called. {HELP}")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward.function: the parameters of {name} cannot be read (a builtin?). Wrap it in a def. {HELP}"
        ) from None
    options = dict(options or {})
    _check_options(name, parameters, options)
    free = {key: parameter for key, parameter in parameters.items() if key not in options}
    is_async = inspect.iscoroutinefunction(_unwrapped(function))
    if "completions" in free:
        return RewardFunction(name, is_async, many=_trl(function, free, options))
    if "solution_str" in free:
        return RewardFunction(name, is_async, one=_one(function, name, free, options, VERL))
    if "response" in free:
        return RewardFunction(name, is_async, one=_one(function, name, free, options, OWN))
    raise ConfigError(f"reward.function: {name}({', '.join(parameters)}) fits no known signature. {HELP}")


def name_of(function: Function) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _unwrapped(function: Function) -> Function:
    function = getattr(function, "func", function)
    return function if inspect.isroutine(function) else type(function).__call__


def _takes_any(parameters: dict[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _required(parameters: dict[str, inspect.Parameter]) -> list[str]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [key for key, p in parameters.items() if p.default is p.empty and p.kind not in variadic]


def _check_options(name: str, parameters: Any, options: dict[str, Any]) -> None:
    if _takes_any(dict(parameters)):
        return
    for key in options:
        if key not in parameters:
            raise ConfigError(f"reward.options.{key}: {name} has no such parameter{suggest(key, parameters)}")


def _check_provided(name: str, free: dict[str, inspect.Parameter], provided: Provided) -> None:
    missing = [key for key in _required(free) if key not in provided]
    if missing:
        raise ConfigError(
            f"reward.function: {name} asks for {', '.join(missing)}, which nobody provides. Give it in reward.options, "
            f"or a default. {HELP}"
        )


def _trl(function: Function, free: dict[str, inspect.Parameter], options: dict[str, Any]) -> Callable[..., Any]:
    takes_any = _takes_any(free)
    required = [key for key in _required(free) if key not in ("prompts", "completions")]

    def many(responses: Sequence[str], tasks: Sequence[TaskColumns]) -> Any:
        columns: dict[str, list[Any]] = {
            key: [task.get(key) for task in tasks] for key in dict.fromkeys(k for t in tasks for k in t)
        }
        for key in required:
            if key not in columns:
                raise ValueError(f"the reward asks for column {key!r}{suggest(key, columns)}")
        given = {"prompts": [task.get("prompt", "") for task in tasks], "completions": list(responses)}
        keywords = {key: value for key, value in {**columns, **given}.items() if takes_any or key in free}
        return function(**{**keywords, **options})

    return many


def _one(
    function: Function, name: str, free: dict[str, inspect.Parameter], options: dict[str, Any], provided: Provided
) -> Callable[..., Any]:
    _check_provided(name, free, provided)
    wanted = {key: value for key, value in provided.items() if key in free}

    def one(response: str, task: TaskColumns) -> Any:
        return function(**{key: value(response, task) for key, value in wanted.items()}, **options)

    return one
