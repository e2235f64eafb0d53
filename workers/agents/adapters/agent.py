"""Agents from elsewhere: a function or a command that speaks OpenAI's or Anthropic's protocol to the policy.

    async def solve(question, base_url, api_key): ...      its answer; other arguments are columns of the row, and
    def solve(question, base_url, api_key): ...            `messages`: the row's conversation with data.system_prompt
    python my_agent.py                                     the same as JSON on stdin, its answer on stdout, and
                                                           OPENAI_BASE_URL, OPENAI_API_KEY and Anthropic's set

The answer is scored by a reward function (`reward=`), and by default is right if it is the row's answer. Tasks come
from a dataset.
"""

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from penstock.conf.errors import ConfigError
from penstock.network.host import no_proxy_variables
from penstock.workers.agents.child_process import Child
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.agents.gateway.conversation import as_openai
from penstock.workers.agents.scoring import Scoring
from penstock.workers.agents.toolbox import MAX_LEFT, ToolThreads
from penstock.workers.user_code import absolute, file_of, find_function, with_file

MAX_OUTPUT = 2**20
"""Largest output of a command that is kept, in bytes."""
INHERITED = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "TERM", "TMPDIR",
    "TZ", "USER", "VIRTUAL_ENV",
)  # fmt: skip
"""Environment variables that a command gets. Others of this process may be secrets: keys of trackers and stores."""
KEY = "environment.options.reward"


@environment("agent")
class Agent:
    """An agent that is either a `function` or a `command`."""

    def __init__(
        self,
        function: str | None = None,
        command: Sequence[str] | None = None,
        reward: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        """`function`: `file.py:function`; one that is not async has a thread for each attempt. `command`: program and
        arguments. `reward`: `file.py:function` of (answer, task), where `task` has the row's columns; or a name as in
        `reward.function`. It runs in processes of its own. `env`: environment variables of the command beside those in
        `INHERITED`; null for one whose value it takes over from this process. Raises `ConfigError`."""
        if (function is None) == (command is None):
            raise ConfigError("environment.options: give agent either a function or a command.")
        self._function = find_function(function, "environment.options.function") if function else None
        self._command = list(command or ())
        self._env = {str(name): value for name, value in (env or {}).items()}
        answers_from = [file] if (file := file_of(function or "")) else []
        self._scoring = Scoring(as_reward(reward), files=answers_from) if reward else None
        self._threads = ToolThreads(MAX_LEFT)

    async def run(self, task: Task, ctx: Context) -> None:
        if self._function is not None:
            given = {**row_of(task), "task": dict(task.data), "base_url": ctx.base_url, "api_key": ctx.api_key}
            taken = inspect.signature(self._function).parameters
            answer = await self._ask_function({name: value for name, value in given.items() if name in taken})
        else:
            answer = await self._ask_command(task, ctx)
        if self._scoring is None:
            ctx.reward(is_right(answer, task.data))
        else:
            ctx.reward(await ctx.scored(self._scoring.score(answer, task.data)))

    async def aclose(self) -> None:
        if self._scoring is not None:
            await self._scoring.aclose()

    async def _ask_function(self, arguments: Mapping[str, Any]) -> Any:
        function = self._function
        assert function is not None
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        return await self._threads.call(partial(function, **arguments))  # until the attempt's time is over

    async def _ask_command(self, task: Task, ctx: Context) -> str:
        env = {**self._environment(), **ctx.describe()}
        own = [host] if (host := urlsplit(ctx.base_url).hostname) else []
        child = await Child.start(self._command, env | no_proxy_variables(env, own))
        try:
            output = await child.answer(json.dumps(row_of(task), default=str).encode(), MAX_OUTPUT)
            if child.exit_code:
                raise RuntimeError(f"{self._command[0]}: {await child.ending()}")
        finally:
            child.kill()
            await child.end()
        return output.decode(errors="replace").strip()

    def _environment(self) -> dict[str, str]:
        names = (*INHERITED, *(name for name, value in self._env.items() if value is None))
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        return inherited | {name: str(value) for name, value in self._env.items() if value is not None}


def row_of(task: Task) -> dict[str, Any]:
    """The columns of a task, with its conversation as `messages`, as OpenAI's clients send them."""
    return {**task.data, **({"messages": as_openai(task.messages)} if task.messages else {})}


def is_right(answer: Any, task: Mapping[str, Any]) -> float:
    """Return 1.0 for the row's answer, else 0.0."""
    return float(str(answer).strip() == str(task.get("answer")).strip())


@dataclass(frozen=True)
class AnswerReward:
    """A reward function of (answer, task), with any parameter names, in the form that reward processes take."""

    name: str

    def __call__(self, response: Any, task: Mapping[str, Any]) -> Any:
        return find_function(self.name, KEY)(response, task)


def as_reward(name: str) -> str | Callable[..., Any]:
    """The function in the form that `Scoring` takes. Raises `ConfigError`."""
    if ":" not in name:
        return name
    parameters = inspect.signature(find_function(name, KEY)).parameters
    if {"response", "completions", "solution_str"} & {*parameters}:
        return name
    if len(parameters) < 2:
        raise ConfigError(f"{KEY}={name}: a function of (answer, task) is due, not of ({', '.join(parameters)}).")
    return AnswerReward(with_file(name, absolute))
