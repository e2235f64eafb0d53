"""A common way to call three kinds of reward functions: Penstock's own, TRL's and verl's, sync or async; and the
response that they score: its text, the answer in it, its tokens.

    def reward(response, task): ...                                             # also (response, answer)
    def reward(prompts, completions, **columns) -> list[float | None]: ...      # TRL: one call scores a batch
    def reward(data_source, solution_str, ground_truth, extra_info=None): ...   # verl: a float, or a dict with "score"

The names of the parameters decide which kind it is. `adapt` is called once per process, and before a run starts.

The first kind gets the answer, which stands after the thinking; the others get the whole text. TRL's functions get
messages where the prompt is a conversation, or where they are annotated to take them.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.algorithms.graph.columns import OPENS_THINKING, TASK_MESSAGES
from penstock.conf.errors import ConfigError, suggest
from penstock.workers.models.tokenizer import split_thinking

Function = Callable[..., Any]
Parameters = dict[str, inspect.Parameter]
TaskColumns = dict[str, Any]
HELP = (
    "A reward takes (response, task) or (response, answer); or, as TRL, (prompts, completions, **columns); "
    "or, as verl, (data_source, solution_str, ground_truth, extra_info=None)."
)
Provided = dict[str, Callable[[Any, TaskColumns], Any]]
"""Arguments of a function that scores one sample, by parameter: from the response and the task."""
LogMetric = Callable[[str, float], None]
"""TRL's `log_metric`: the name of a metric and a value of it."""
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
class Response:
    """A sampled response. What an environment takes for an answer is scored without it, as it is."""

    text: str
    """Whole text, thinking included."""
    token_ids: Sequence[int] = ()
    """Sampled tokens; empty where there are none, as for a text that a user has written."""
    version: int = 0
    """Newest version of the policy when it was scored."""
    opens_thinking: bool = False
    """True if its prompt has begun the thinking."""
    prompt: Sequence[Mapping[str, Any]] = ()
    """Messages of its prompt; empty for a prompt that is a text."""

    @cached_property
    def answer(self) -> str:
        """The text after the thinking; empty where the thinking has no end."""
        return split_thinking(self.text, begun=self.opens_thinking)[1]


def with_task(response: Any, task: str) -> tuple[Any, dict[str, Any]]:
    """The response with what its task says of the prompt, and the columns of the task (JSON) that rewards get."""
    columns = json.loads(task)
    opens_thinking, messages = bool(columns.pop(OPENS_THINKING, False)), columns.pop(TASK_MESSAGES, ())
    if isinstance(response, Response):
        response = replace(response, opens_thinking=opens_thinking, prompt=messages)
    return response, columns


def text_of(response: Any) -> Any:
    """The whole text of a response; an environment's answer as it is."""
    return response.text if isinstance(response, Response) else response


def answer_of(response: Any) -> Any:
    """The answer of a response; an environment's as it is."""
    return response.answer if isinstance(response, Response) else response


@dataclass(frozen=True)
class RewardFunction:
    """A user's function behind one signature. Exactly one of `one` and `many` is set; either may return an awaitable.

    `one(response, task)` scores a sample; `many(responses, tasks)` scores a batch and returns one value a sample. A
    response is a `Response`, or an environment's answer.
    """

    name: str
    is_async: bool
    one: Callable[[Any, TaskColumns], Any | Awaitable[Any]] | None = None
    many: Callable[[Sequence[Any], Sequence[TaskColumns]], Any | Awaitable[Any]] | None = None


@dataclass(frozen=True)
class TrainerState:
    """The training's state as TRL's functions get it."""

    global_step: int
    """Number of policy updates when the batch is scored."""
    max_steps: int


@dataclass(frozen=True)
class Caller:
    """What functions are called with, beside samples and options."""

    with_thinking: bool | None = None
    """`reward.with_thinking`."""
    max_steps: int = 0
    """Steps of the run."""
    log_metric: LogMetric = lambda name, value: None

    def read(self, response: Any, *, is_own: bool) -> Any:
        """The text that a function gets. `is_own`: it has Penstock's own signature."""
        whole = not is_own if self.with_thinking is None else self.with_thinking
        return text_of(response) if whole else answer_of(response)


CALLER = Caller()


def adapt(function: Function, options: dict[str, Any] | None = None, caller: Caller = CALLER) -> RewardFunction:
    """The scorer of a function, with `options` bound as keyword arguments. A function that only takes options makes the
    reward, as `trl.rewards.get_cosine_scaled_reward` does.

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
    if "completions" in free or "completion_ids" in free:
        return RewardFunction(name, is_async, many=_TrlCall(function, free, options, caller))
    if "solution_str" in free:
        return RewardFunction(name, is_async, one=_one(function, name, free, options, VERL, caller))
    if "response" in free:
        return RewardFunction(name, is_async, one=_one(function, name, free, options, OWN, caller))
    if not _required(free) and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in free.values()):
        return adapt(_made(function, name, options), caller=caller)
    raise ConfigError(f"reward.function: {name}({', '.join(parameters)}) fits no known signature. {HELP}")


def name_of(function: Function) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _unwrapped(function: Function) -> Function:
    function = getattr(function, "func", function)
    return function if inspect.isroutine(function) else type(function).__call__


def _takes_any(parameters: Parameters) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _required(parameters: Parameters) -> list[str]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [key for key, p in parameters.items() if p.default is p.empty and p.kind not in variadic]


def _check_options(name: str, parameters: Any, options: dict[str, Any]) -> None:
    if _takes_any(dict(parameters)):
        return
    for key in options:
        if key not in parameters:
            raise ConfigError(f"reward.options.{key}: {name} has no such parameter{suggest(key, parameters)}")


def _check_provided(name: str, free: Parameters, provided: Provided) -> None:
    missing = [key for key in _required(free) if key not in provided]
    if missing:
        raise ConfigError(
            f"reward.function: {name} asks for {', '.join(missing)}, which nobody provides. Give it in reward.options, "
            f"or a default. {HELP}"
        )


class _TrlCall:
    """A function called as TRL's trainers call it, with lists of columns."""

    def __init__(self, function: Function, free: Parameters, options: dict[str, Any], caller: Caller) -> None:
        self._function, self._free, self._options, self._caller = function, free, options, caller
        self._takes_any = _takes_any(free)
        self._takes_messages = "completions" in free and _is_of_messages(free["completions"].annotation)
        self._unkept: set[str] = set()

    def __call__(self, responses: Sequence[Any], tasks: Sequence[TaskColumns]) -> Any:
        columns = {
            key: [task.get(key) for task in tasks] for key in dict.fromkeys(key for task in tasks for key in task)
        }
        if "solution" in self._free and "answer" in columns:
            columns.setdefault("solution", columns["answer"])
        given = {**columns, **self._of_batch(responses, tasks)}
        for key in _required(self._free):
            if key not in given:
                raise ValueError(f"the reward asks for column {key!r}{suggest(key, columns)}")
        keywords = {key: value for key, value in given.items() if self._takes_any or key in self._free}
        return self._function(**{**keywords, **self._options})

    def _of_batch(self, responses: Sequence[Any], tasks: Sequence[TaskColumns]) -> dict[str, Any]:
        """The arguments that TRL gives beside columns."""
        sampled = [one if isinstance(one, Response) else Response("") for one in responses]
        has_messages = self._takes_messages or bool(sampled[0].prompt)
        texts = [self._caller.read(one, is_own=False) for one in responses]
        prompts: list[Any] = [task.get("prompt", "") for task in tasks]
        if has_messages:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
            prompts = [
                list(one.prompt) or [{"role": "user", "content": prompt}]
                for one, prompt in zip(sampled, prompts, strict=True)
            ]
        step = max(one.version for one in sampled)
        return {
            "prompts": prompts, "completions": texts, "completion_ids": [list(one.token_ids) for one in sampled],
            "trainer_state": TrainerState(step, self._caller.max_steps),
            "log_metric": self._caller.log_metric, "log_extra": self._log_extra,
        }  # fmt: skip

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Take what a table of completions would show, and say once that it is not kept."""
        if column not in self._unkept:
            self._unkept.add(column)
            print(f"log_extra({column!r}, …): not kept; samples show the columns of the dataset.", flush=True)


def _is_of_messages(annotation: Any) -> bool:
    """Return whether completions are annotated as lists of messages: `list[list[dict[str, str]]]`."""
    return re.match(r"(?:typing\.)?list\[(?:typing\.)?list\[", str(annotation), re.IGNORECASE) is not None


def _made(function: Function, name: str, options: dict[str, Any]) -> Any:
    """The reward that a function makes of its options alone."""
    try:
        return function(**options)
    except Exception as error:
        raise ConfigError(f"reward.function: {name} made no reward: {type(error).__name__}: {error}. {HELP}") from error


def _one(
    function: Function, name: str, free: Parameters, options: dict[str, Any], provided: Provided, caller: Caller
) -> Callable[..., Any]:
    _check_provided(name, free, provided)
    wanted = {key: value for key, value in provided.items() if key in free}

    def one(response: Any, task: TaskColumns) -> Any:
        text = caller.read(response, is_own=provided is OWN)
        return function(**{key: value(text, task) for key, value in wanted.items()}, **options)

    return one
