"""A server of tools, which speaks the Model Context Protocol: in a process of its own, over its stdin and stdout, or
elsewhere, over HTTP (`mcp_connection.py`).

server = McpServer("files", McpCommand("python", ("files.py",)), start_timeout_s=30)
await server.start()
server.tools                  what a `Toolbox` takes
await server.stop()           the process and all that it has started are gone
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import anyio

from penstock.workers.environments.child import LEAVE_S, SOON_S, Child
from penstock.workers.environments.mcp_connection import McpAddress, McpConnection, cause_of
from penstock.workers.environments.toolbox import as_text
from penstock.workers.lifecycle.contained import retrieve_failure


@dataclass(frozen=True)
class McpCommand:
    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside PATH, HOME and a few more: a server does not see this process's keys."""


class McpProcess(Child):
    """The process of a server, and messages over its stdin and stdout. Lifecycle: `started`, `messages`, `end`.

    It replaces the transport of the `mcp` package, which does not say which process it has started. When that process
    ends by itself, the package does not end its children.
    """

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
            both.start_soon(self._receive, heard)
            both.start_soon(self._send, to_say)
            try:
                yield read, write
            finally:
                both.cancel_scope.cancel()
                for stream in (heard, read, write, to_say):
                    stream.close()

    async def _receive(self, heard: Any) -> None:
        message = importlib.import_module("mcp.shared.message").SessionMessage
        read_json = importlib.import_module("mcp_types").jsonrpc_message_adapter.validate_json
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
            async with heard:
                while line := await self.line():
                    try:
                        await heard.send(message(read_json(line, by_name=False)))
                    except ValueError as error:  # servers print to where they should not
                        await heard.send(error)

    async def _send(self, to_say: Any) -> None:
        with suppress(anyio.ClosedResourceError, ConnectionError):
            async for said in to_say:
                await self.say(said.message.model_dump_json(by_alias=True, exclude_unset=True).encode())


class McpFailed(Exception):
    """The error of a call, whose text the model gets; or the reason why a server could not be started."""


@dataclass(frozen=True)
class McpTool:
    """A tool of a server, in the form that a `Toolbox` takes."""

    server: "McpServer"
    name: str
    """Name in the server; the model may know the tool by another."""
    schema: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self.server.call(self.name, arguments)

    def renamed(self, name: str) -> "McpTool":
        return McpTool(self.server, self.name, {**self.schema, "function": {**self.schema["function"], "name": name}})


class McpServer:
    """Lifecycle: `start`, `stop`, once. The server may end by itself meanwhile; every later call then fails."""

    def __init__(
        self, name: str, command: McpCommand | McpAddress, start_timeout_s: float,
        count: Callable[[str], None] = lambda what: None,
    ) -> None:  # fmt: skip
        """`count`: takes the name of an event, for metrics."""
        self.name = name
        self.tools: Sequence[McpTool] = ()
        self._command, self._start_timeout_s, self._count = command, start_timeout_s, count
        self._process: McpProcess | McpConnection | None = None
        self._client: Any = None
        self._ready, self._stop = asyncio.Event(), asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the server. Raises `McpFailed` if it does not list its tools in time."""
        self._serving = asyncio.create_task(self._serve())
        waiting = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([waiting, self._serving], timeout=self._start_timeout_s, return_when="FIRST_COMPLETED")
        finally:
            waiting.cancel()
        if self._ready.is_set():
            return
        self._count("mcp_not_started")
        why = f"it did not say within {self._start_timeout_s:g} s which tools it has"
        if self._serving.done():
            error = self._serving.exception()
            why = str(error) if not isinstance(error, BaseExceptionGroup) else cause_of(error)
        if self._process is not None:
            why += f"; {await self._process.ending()}"
        await self.stop()
        raise McpFailed(f"the MCP server {self.name} could not be started: {why}")

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.has_ended

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; return its result as text. Raises `McpFailed`. A cancelled call does not wait for the server."""
        assert self._process is not None
        if self.has_ended:
            raise McpFailed(f"the MCP server {self.name}: {await self._process.ending()}")
        calling = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        calling.add_done_callback(retrieve_failure)
        dying = asyncio.ensure_future(self._process.ended())
        try:  # what it has started may hold its pipes open after it has died
            await asyncio.wait([calling, dying], return_when="FIRST_COMPLETED")
            if calling.done() and calling.exception() is None:
                return _text_of(calling.result())
            is_cut_off = calling.done() and "closed" in str(calling.exception()).lower()
            ending = await self._process.ending(LEAVE_S if is_cut_off else SOON_S)
        finally:
            dying.cancel()
            calling.cancel()
        if not self.has_ended:
            raise McpFailed(str(calling.exception()))
        self._count("mcp_died")
        raise McpFailed(f"the MCP server {self.name}: {ending}")

    async def stop(self) -> None:
        """Stop the server. The process and its descendants are gone then, however it behaves."""
        self._stop.set()
        if self._process is not None and not self._ready.is_set():
            self._process.kill()
        if self._serving is None:
            return
        try:
            await asyncio.wait([self._serving], timeout=3 * LEAVE_S)
        finally:
            if not self._serving.done():
                self._serving.cancel()
            retrieve_failure(self._serving)

    async def _serve(self) -> None:
        """Run the client, in a task of its own, as scopes of anyio are left where they were entered."""
        client = importlib.import_module("mcp").Client
        if isinstance(self._command, McpAddress):
            self._process = await McpConnection.started(self._command)
        else:
            self._process = await McpProcess.started(self._command)
        try:
            async with client(self._process.messages()) as self._client:
                self.tools = [_described(self, tool) for tool in await _all_tools(self._client)]
                self._ready.set()
                await self._stop.wait()
        finally:
            await self._process.end()


def _text_of(result: Any) -> str:
    if result.is_error:
        raise McpFailed(result_text(result))
    return result_text(result)


def result_text(result: Any) -> str:
    """The text of a result: texts as they are; pictures, sounds and files by their kind and size."""
    said = [_block_text(block) for block in result.content]
    if not said and result.structured_content is not None:
        return as_text(result.structured_content)
    return "\n".join(said)


def _block_text(block: Any) -> str:
    resource = getattr(block, "resource", block)
    text = getattr(resource, "text", None)
    if text is not None:
        return as_text(text)
    data = getattr(resource, "data", None) or getattr(resource, "blob", None)
    size = f", {len(data) * 3 // 4:,} bytes that are no text" if data else ""
    return f"[{getattr(resource, 'uri', None) or getattr(resource, 'mime_type', None) or block.type}{size}]"


async def _all_tools(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return found


def _described(server: McpServer, tool: Any) -> McpTool:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return McpTool(server, tool.name, {"type": "function", "function": function})
