"""Makes the calls that a model asks for: in time, in threads where functions block, and with an answer to each.

A tool that raises, hangs, returns a megabyte or bytes that are no text ends nothing: the model is told, and it is
counted.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import ResourceError
from penstock.workers.contained import CodeEnded, TookTooLong, contained
from penstock.workers.environments.tools.description import Described
from penstock.workers.environments.tools.threads import ToolThreads
from penstock.workers.gateway.formats.format import Message, Tools
from penstock.workers.sandbox.limits import Limits
from penstock.workers.sandbox.tools import TIMED
from penstock.workers.trajectory.turn import ToolCall, Turn


class ToolLimits(Protocol):
    """The limits of tools; `EnvironmentConfig` has them."""

    tool_timeout_s: float
    max_tool_characters: int
    sandbox: SandboxConfig


Call = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""Function that makes a call with the model's arguments."""


class Toolbox:
    """Tools that are described to a model. Descriptions alone are for tools that other code calls."""

    def __init__(
        self,
        tools: Sequence[Any],
        limits: ToolLimits,
        threads: ToolThreads,
        counts: Counter[str] | None = None,
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
                described = Described(tool)
                found.append(described.schema)
                self._calls[described.name] = self._caller(described)
        self.descriptions: Tools = tuple(found)

    async def answers(self, turn: Turn) -> list[Message]:
        """Answer each call of a turn with a message; calls that could not be read, with one that says why. None for a
        turn that calls nothing."""
        if turn.problem:
            return [{"role": "user", "content": f"Error: {turn.problem}"}]
        contents = await asyncio.gather(*(self.call(call) for call in turn.calls))
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            for call, content in zip(turn.calls, contents, strict=True)
        ]

    async def call(self, call: ToolCall) -> str:
        """Return a tool's value as text; or what was wrong, in a sentence that begins with Error. Raises
        `ResourceError` where too many tools hang for good."""
        make = self._calls.get(call.name)
        if make is None:
            self._counts["tools_unknown"] += 1
            return f"Error: there is no tool {call.name!r:.60}. There are: {', '.join(self._calls) or 'none'}."
        self._counts["tools"] += 1
        try:
            value = await make(call.arguments)
        except ResourceError:
            raise
        except TookTooLong:
            self._counts["tools_timeout"] += 1
            return f"Error: {call.name} did not return within {self._limits.tool_timeout_s:g} s."
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the model
            self._counts["tools_raised"] += 1
            said = str(error) if isinstance(error, CodeEnded) else f"{type(error).__name__}: {error}"
            return self._cut(f"Error: {said}")
        return self._cut(as_text(value))

    def _caller(self, described: Described) -> Call:
        function = described.function
        if inspect.iscoroutinefunction(function) and (timed := TIMED.get(function)):
            within = self._limits.tool_timeout_s, Limits.of(self._limits.sandbox)
            return lambda arguments: contained(timed(*within, **described.arguments(arguments)))
        if inspect.iscoroutinefunction(function):
            return self._in_time(lambda arguments: function(**described.arguments(arguments)))

        async def call(arguments: Mapping[str, Any]) -> Any:
            make = partial(function, **described.arguments(arguments))
            return await self._threads.call(make, self._limits.tool_timeout_s)

        return call

    def _in_time(self, make: Call) -> Call:
        async def call(arguments: Mapping[str, Any]) -> Any:
            return await contained(make(arguments), self._limits.tool_timeout_s)

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
