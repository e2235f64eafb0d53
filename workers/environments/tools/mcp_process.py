"""The process of an MCP server, and messages over its stdin and stdout.

It replaces the transport of the `mcp` package, which does not say which process it has started. When that process ends
by itself, the package does not end its children.
"""

import importlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import anyio

from penstock.workers.environments.child import Child


@dataclass(frozen=True)
class McpCommand:
    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside PATH, HOME and a few more: a server does not see this process's keys."""


class McpProcess(Child):
    """Lifecycle: `started`, `messages`, `end`."""

    @classmethod
    async def started(cls, command: McpCommand) -> Self:
        """Start the process. Raises `OSError`."""
        inherited = importlib.import_module("mcp.client.stdio").get_default_environment()
        return await cls.start([command.command, *command.args], {**inherited, **command.env})

    @asynccontextmanager
    async def messages(self) -> AsyncIterator[Any]:
        """Open two streams, as the package's clients take them. The one to read from ends with the process."""
        heard, read = anyio.create_memory_object_stream[Any](0)
        write, to_say = anyio.create_memory_object_stream[Any](0)
        async with anyio.create_task_group() as both:
            both.start_soon(self._hear, heard)
            both.start_soon(self._say, to_say)
            try:
                yield read, write
            finally:
                both.cancel_scope.cancel()
                for stream in (heard, read, write, to_say):
                    stream.close()

    async def _hear(self, heard: Any) -> None:
        message = importlib.import_module("mcp.shared.message").SessionMessage
        read_json = importlib.import_module("mcp_types").jsonrpc_message_adapter.validate_json
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
            async with heard:
                while line := await self.line():
                    try:
                        await heard.send(message(read_json(line, by_name=False)))
                    except ValueError as error:  # servers print to where they should not
                        await heard.send(error)

    async def _say(self, to_say: Any) -> None:
        with suppress(anyio.ClosedResourceError, ConnectionError):
            async for said in to_say:
                await self.say(said.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
