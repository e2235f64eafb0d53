"""Agents of other people: a function or a command that speaks OpenAI's or Anthropic's protocol to the policy.

    async def solve(question, base_url, api_key): ...      its answer; other arguments are columns of the row, and
                                                           `messages`: the row's conversation with data.system_prompt
    python my_agent.py                                     the same as JSON on stdin, its answer on stdout, and
                                                           OPENAI_BASE_URL, OPENAI_API_KEY and Anthropic's set

The answer is scored by a reward function (`reward=`), and by default is right if it is the row's answer. Tasks come
from a dataset.
"""

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.workers.environments.context import Context
from penstock.workers.environments.environment import environment
from penstock.workers.environments.task import Task
from penstock.workers.user_code import find_function

MAX_OUTPUT = 2**20
"""Bytes of a command's output that are read."""


@environment("agent")
class Agent:
    """One of `function` and `command`."""

    def __init__(
        self, function: str | None = None, command: Sequence[str] | None = None, reward: str | None = None
    ) -> None:
        """`function`: `file.py:function`, async. `command`: program and arguments. `reward`: `file.py:function`, of
        (answer, task), where `task` has the row's columns. Raises `ConfigError`."""
        if (function is None) == (command is None):
            raise ConfigError("environment.options: give agent either a function or a command.")
        self._function = find_function(function, "environment.options.function") if function else None
        self._command = list(command or ())
        self._score = find_function(reward, "environment.options.reward") if reward else is_right
        if self._function is not None and not inspect.iscoroutinefunction(self._function):
            raise ConfigError(f"environment.options.function={function}: an async function is due.")

    async def run(self, task: Task, ctx: Context) -> None:
        if self._function is not None:
            told = {**row_of(task), "task": dict(task.data), "base_url": ctx.base_url, "api_key": ctx.api_key}
            taken = inspect.signature(self._function).parameters
            answer = await self._function(**{name: value for name, value in told.items() if name in taken})
        else:
            answer = await self._ask_command(task, ctx)
        score = self._score(answer, dict(task.data))
        ctx.reward(float(await score if inspect.isawaitable(score) else score))

    async def _ask_command(self, task: Task, ctx: Context) -> str:
        """Its own session, so that whatever it starts ends with it."""
        process = await asyncio.create_subprocess_exec(
            *self._command, env={**os.environ, **ctx.describe()}, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True, limit=MAX_OUTPUT,
        )  # fmt: skip
        try:
            output, errors = await process.communicate(json.dumps(row_of(task), default=str).encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            tail = errors.decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"{self._command[0]} ended with {process.returncode}: {tail}")
        return output[:MAX_OUTPUT].decode(errors="replace").strip()


def row_of(task: Task) -> dict[str, Any]:
    """Its columns, with its conversation as `messages`."""
    return {**task.data, **({"messages": list(task.messages)} if task.messages else {})}


def is_right(answer: Any, task: Mapping[str, Any]) -> float:
    """1.0 for the row's answer, else 0.0."""
    return float(str(answer).strip() == str(task.get("answer")).strip())
