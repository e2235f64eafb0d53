"""Tools of a model: Python functions, described by their types and docstrings, and called as the model asks for it.

    function ─▶ DescribedFunction: name, JSON schema ─▶ the model ─▶ calls ─▶ Toolbox ─▶ an answer to each

Calls have a time limit, and plain functions run in threads (`ToolThreads`). A tool that raises, hangs, returns a
megabyte or bytes that are no text ends nothing: the model gets the error, and it is counted. Penstock brings the tool
`python`, which runs programs in a sandbox.
"""

import asyncio
import atexit
import ctypes
import inspect
import json
import math
import os
import threading
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

from pydantic import TypeAdapter, create_model
from pydantic.errors import PydanticUserError

from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError, InfrastructureError, ResourceError
from penstock.workers.agents.gateway.conversation import Message, Tools
from penstock.workers.agents.trajectory import ToolCall, Turn
from penstock.workers.pictures.prompt_pictures import is_image
from penstock.workers.runtime.async_tasks import UserCodeExit, UserCodeTimeout, run_contained
from penstock.workers.sandbox.execution import Limits, ProgramOutcome
from penstock.workers.sandbox.sandbox import Sandbox

MAX_LEFT = 1000
"""Largest number of threads that hang; each costs memory, and the system's number of threads is limited too."""
MAX_CHARACTERS = 8_000
"""Largest number of characters that the tool `python` returns: a model pays for each of them."""
sandboxes: dict[tuple[asyncio.AbstractEventLoop, Limits], Sandbox] = {}
Call = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Function that makes a call with the model's arguments."""


class ToolThreads:
    """Lifecycle: `call` any number of times, also concurrently. Nothing has to be closed: threads end with the
    process."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: calls that run at a time."""
        self._places = asyncio.Semaphore(num_threads)
        self._left: list[threading.Thread] = []

    @property
    def num_left(self) -> int:
        """Number of threads that were given up and have not ended."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        return len(self._left)

    async def call(self, function: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Run a function in a thread; return or raise what it does. `timeout_s`: from where it begins to run; None:
        until the caller is cancelled. Raises `UserCodeTimeout`, `UserCodeExit`; `ResourceError` where too many hang for
        good."""
        async with self._places:
            if self.num_left >= MAX_LEFT:
                raise ResourceError(
                    f"{MAX_LEFT:,} calls of tools hang in threads, which nobody can end. Give the tool a timeout of "
                    "its own, make it async, or have it run in a process or in ctx.sandbox()."
                )
            done = asyncio.get_running_loop().create_future()
            arguments = (_run, function, asyncio.get_running_loop(), done)
            thread = threading.Thread(target=copy_context().run, args=arguments, name="tool", daemon=True)
            thread.start()
            try:
                await asyncio.wait([done], timeout=timeout_s)
            finally:
                if not done.done():
                    done.cancel()
                    self._leave(thread)
            if done.cancelled():
                raise UserCodeTimeout(f"it took longer than {timeout_s:g} s")
            return done.result()

    def _leave(self, thread: threading.Thread) -> None:
        """Ask a thread to end. A loop in Python ends by this; a wait in C lasts until it returns."""
        self._left.append(thread)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


def _run(function: Callable[[], Any], loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Any]") -> None:
    value: Any = None
    failure: Exception | None = None
    try:
        value = function()
    except StopIteration as error:  # no future takes it
        failure = RuntimeError(f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever it is, its caller gets it
        failure = error
    except BaseException as error:  # noqa: BLE001 - nor does it end the loop
        failure = UserCodeExit(f"{type(error).__name__}: {error}")
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_resolve, done, value, failure)


def _resolve(done: "asyncio.Future[Any]", value: Any, failure: Exception | None) -> None:
    if done.done():
        return
    if failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(value)


class DescribedFunction:
    """A typed function with its description: its name, its docstring and a JSON schema of its parameters. `arguments`
    checks the arguments that a model gave."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Describe the function. Raises `ConfigError` if its parameters cannot be described."""
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        fields: dict[str, Any] = {}
        hints = typing.get_type_hints(function, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"tool {self.name}: its parameter {name} has no name that a model could give.")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
        try:
            self._model = create_model(f"{self.name}_arguments", **fields)
            schema = TypeAdapter(self._model).json_schema()
        except PydanticUserError as error:
            raise ConfigError(f"tool {self.name}: its parameters cannot be described: {error}") from error
        described = {"name": self.name, "description": inspect.getdoc(function) or "", "parameters": _plain(schema)}
        self.schema: Mapping[str, Any] = {"type": "function", "function": described}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments to what the function takes. Raises `ValueError` with what is wrong with each."""
        unknown = given.keys() - self._model.model_fields.keys()
        if unknown:
            raise ValueError(f"{self.name} has no parameter {', '.join(map(repr, sorted(unknown)))}")
        values = self._model(**given)
        return {name: getattr(values, name) for name in self._model.model_fields}


def _plain(schema: Any) -> Any:
    """The schema without the titles that pydantic makes of names."""
    if isinstance(schema, Mapping):
        return {key: _plain(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


class Toolbox:
    """Tools that are described to a model. Descriptions alone are for tools that other code calls."""

    def __init__(
        self, tools: Sequence[Any], limits: EnvironmentConfig, threads: ToolThreads, counts: Counter[str] | None = None
    ) -> None:
        """`tools`: functions (async or not), objects with `schema` and an async `call(arguments)`, or descriptions."""
        self._limits, self._threads = limits, threads
        self._counts = counts if counts is not None else Counter()
        self._calls: dict[str, Call] = {}
        found: list[Mapping[str, Any]] = []
        for tool in tools:
            if isinstance(tool, Mapping):
                found.append(tool)
            elif hasattr(tool, "schema") and hasattr(tool, "call"):
                found.append(tool.schema)
                self._calls[str(tool.schema["function"]["name"])] = self._in_time(tool.call)
            else:
                described = DescribedFunction(tool)
                found.append(described.schema)
                self._calls[described.name] = self._caller(described)
        self.descriptions: Tools = tuple(found)

    async def answers(self, turn: Turn) -> list[Message]:
        """Answer each call of a turn with a message; calls that could not be read, with one that says why. Empty
        for a turn that calls nothing."""
        if turn.problem:
            return [{"role": "user", "content": f"Error: {turn.problem}"}]
        contents = await asyncio.gather(*(self.call(call) for call in turn.calls))
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            for call, content in zip(turn.calls, contents, strict=True)
        ]

    async def call(self, call: ToolCall) -> str | list[Any]:
        """Return a tool's value as text, or with images of PIL's as a list of texts and images; or what was wrong, in
        a sentence that begins with Error. Raises `ResourceError` where too many tools hang for good."""
        make = self._calls.get(call.name)
        if make is None:
            self._counts["tools_unknown"] += 1
            return f"Error: there is no tool {call.name!r:.60}. There are: {', '.join(self._calls) or 'none'}."
        self._counts["tools"] += 1
        try:
            value = await make(call.arguments)
        except (ResourceError, InfrastructureError):
            raise
        except UserCodeTimeout:
            self._counts["tools_timeout"] += 1
            return f"Error: {call.name} did not return within {self._limits.tool_timeout_s:g} s."
        except Exception as error:  # noqa: BLE001 - whatever a tool raises, the model gets it
            self._counts["tools_raised"] += 1
            what = str(error) if isinstance(error, UserCodeExit) else f"{type(error).__name__}: {error}"
            return self._cut(f"Error: {what}")
        parts = value if isinstance(value, list | tuple) else [value]
        if any(map(is_image, parts)):
            return [part if is_image(part) else self._cut(as_text(part)) for part in parts]
        return self._cut(as_text(value))

    def _caller(self, described: DescribedFunction) -> Call:
        function = described.function
        if inspect.iscoroutinefunction(function) and (timed := LIMITED.get(function)):
            within = self._limits.tool_timeout_s, Limits.of(self._limits.sandbox)
            return lambda arguments: run_contained(timed(*within, **described.arguments(arguments)))
        if inspect.iscoroutinefunction(function):
            return self._in_time(lambda arguments: function(**described.arguments(arguments)))

        async def call(arguments: Mapping[str, Any]) -> Any:
            make = partial(function, **described.arguments(arguments))
            return await self._threads.call(make, self._limits.tool_timeout_s)

        return call

    def _in_time(self, make: Call) -> Call:
        async def call(arguments: Mapping[str, Any]) -> Any:
            return await run_contained(make(arguments), self._limits.tool_timeout_s)

        return call

    def _cut(self, text: str) -> str:
        more = len(text) - self._limits.max_tool_characters
        if more <= 0:
            return text
        self._counts["tools_cut"] += 1
        return f"{text[: self._limits.max_tool_characters]}\n[{more:,} more characters were cut]"


def as_text(value: Any) -> str:
    """The text of a tool's value for the model: text as it is, bytes as far as they are UTF-8, the rest as JSON."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="replace")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value).encode(errors="replace").decode()


async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    The program runs alone: without network, packages or files of earlier runs, for at most ten seconds.

    Args:
        code: The whole program. Only what it prints is returned.
    """
    return await _python_within(math.inf, Limits(), code)


async def _python_within(timeout_s: float, limits: Limits, code: str) -> str:
    sandbox = sandbox_of(limits)
    outcome = await sandbox.run_python(code, wall_s=timeout_s)
    if outcome.reason == "timeout_wall" and timeout_s < sandbox.limits.wall_s:
        raise UserCodeTimeout(f"it took longer than {timeout_s:g} s")
    return program_text(outcome)


LIMITED: Mapping[Any, Callable[..., Awaitable[Any]]] = {python: _python_within}
"""Variants of tools that wait for their turn. Before a tool's own arguments, they take the seconds that it may run from
then on and the limits of code. They raise `UserCodeTimeout`."""


def sandbox_of(limits: Limits) -> Sandbox:
    """The sandbox of this event loop, with a worker a core. Sandboxes of loops that are closed are closed, too."""
    for key in [key for key in sandboxes if key[0].is_closed()]:
        sandboxes.pop(key).close()
    key = asyncio.get_running_loop(), limits
    if key not in sandboxes:
        sandboxes[key] = Sandbox(limits, num_workers=os.cpu_count() or 1)
    return sandboxes[key]


@atexit.register
def _close() -> None:
    for sandbox in sandboxes.values():
        sandbox.close()


def program_text(outcome: ProgramOutcome) -> str:
    """The text of an outcome: standard output, then standard error, then how it ended if not well; at most
    `MAX_CHARACTERS`, cut in the middle."""
    parts = [outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n")]
    if outcome.reason != "exited":
        parts.append(f"[ended: {outcome.reason}]")
    elif outcome.exit_code:
        parts.append(f"[exit code {outcome.exit_code}]")
    text = "\n".join(part for part in parts if part)
    more = len(text) - MAX_CHARACTERS
    half = MAX_CHARACTERS // 2 - 20
    return text if more <= 0 else f"{text[:half]}\n[… {len(text) - 2 * half} more …]\n{text[-half:]}"
