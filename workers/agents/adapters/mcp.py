"""Tasks that are solved with the tools of servers that speak the Model Context Protocol: over stdio, each in a process
of its own, or elsewhere, over HTTP.

    server = McpServer("files", McpCommand("python", ("files.py",)), start_timeout_s=30)
    server = McpServer("search", McpAddress("https://tools.example/mcp", {"Authorization": "$KEY"}), start_timeout_s=30)
    await server.start()
    server.tools                  what a `Toolbox` takes
    await server.stop()           the process and all that it has started, or the connection, are gone
"""

import asyncio
import importlib
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import anyio

from penstock.conf.errors import ConfigError, suggest
from penstock.conf.secret import hide_in
from penstock.workers.agents.adapters.tools import Tools
from penstock.workers.agents.child_process import LEAVE_S, SOON_S, Child
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.agents.toolbox import DescribedFunction, as_text
from penstock.workers.runtime.async_tasks import silence_failure

COMMAND = ("command", "args", "env")
"""Options of a server of one's own."""


@dataclass(frozen=True)
class McpAddress:
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request. A value `$NAME` is that of an environment variable, so that keys are in no file."""

    def read_headers(self) -> dict[str, str]:
        """The headers with their values. Raises `OSError` for a variable that is not set."""
        return {name: self._read(name, value) for name, value in self.headers.items()}

    def _read(self, name: str, value: str) -> str:
        if not value.startswith("$"):
            return value
        if value[1:] not in os.environ:
            raise OSError(f"its header {name} is {value}, and this node has no such environment variable")
        return os.environ[value[1:]]


class McpConnection:
    """Lifecycle: `started`, `messages`, `end`."""

    def __init__(self, address: McpAddress, headers: Mapping[str, str]) -> None:
        self._address, self._headers = address, headers
        self._lost = asyncio.Event()
        self._why = ""

    @classmethod
    async def started(cls, address: McpAddress) -> Self:
        """A connection that is made with the first message. Raises `OSError`."""
        return cls(address, address.read_headers())

    @asynccontextmanager
    async def messages(self) -> AsyncIterator[Any]:
        """Open two streams, as the package's clients take them."""
        http = importlib.import_module("mcp.client.streamable_http")
        try:
            async with (
                http.create_mcp_http_client(headers=dict(self._headers)) as client,
                http.streamable_http_client(self._address.url, http_client=client) as streams,
            ):
                yield streams
        except BaseException as error:
            self._why = cause_of(error)
            raise
        finally:
            self._lost.set()

    @property
    def has_ended(self) -> bool:
        return self._lost.is_set()

    async def ended(self) -> None:
        """Wait until the connection has ended."""
        await self._lost.wait()

    async def ending(self, timeout_s: float = SOON_S) -> str:
        """The way in which the connection has ended, in words; one that is about to end is waited for."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), timeout_s)
        state = "is lost" if self.has_ended else "stands"
        return f"the connection to {hide_in(self._address.url)} {state}" + (f" ({self._why})" if self._why else "")

    def kill(self) -> None:
        """Do nothing: the server is not ours."""

    async def end(self) -> None:
        self._lost.set()


def cause_of(error: BaseException) -> str:
    """The text of the first error of a group, or of the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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
        calling.add_done_callback(silence_failure)
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
            silence_failure(self._serving)

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


@environment("mcp")
class Mcp(Tools):
    """Tasks with tools of MCP servers; it has all options of `tools`.

    environment:
      name: mcp
      options:
        servers:
          files: {command: python, args: [files_server.py], env: {ROOT: /data}}
          search: {url: https://tools.example/mcp, headers: {Authorization: $SEARCH_KEY}}
        reward: math_verify
    data: {path: questions.jsonl}
    """

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any]],
        shared: bool = False,
        start_timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        """`servers`: {name: {command, args, env}}, or {name: {url, headers}} for one that runs elsewhere; a header of
        `$NAME` is taken from the environment. Each attempt has servers, or sessions, of its own, and their state;
        `shared`: all attempts of an environment actor have the same servers, which are started again when they die.
        `start_timeout_s`: until a server lists its tools; an attempt whose servers do not has failed. `options`: of
        `tools`. Raises `ConfigError`."""
        super().__init__(**options)
        importlib.import_module("mcp")
        self._commands = {name: _command(name, given) for name, given in servers.items()}
        self._is_shared, self._start_timeout_s = shared, start_timeout_s
        self._shared: Sequence[McpServer] = ()
        self._lock = asyncio.Lock()

    async def run(self, task: Task, ctx: Context) -> None:
        async with self._served(ctx) as servers:
            found = [tool for server in servers for tool in server.tools]
            own = [DescribedFunction(tool).name for tool in self.tools]
            await self.solve(task, ctx, [*self.tools, *with_unique_names(found, own)])

    async def aclose(self) -> None:
        await _stop(self._shared)
        await super().aclose()

    @asynccontextmanager
    async def _served(self, ctx: Context) -> AsyncIterator[Sequence[McpServer]]:
        if self._is_shared:
            yield await self._shared_servers(ctx)
            return
        servers = self._made(ctx)
        try:
            await _start(servers)
            yield servers
        finally:
            await _stop(servers)

    async def _shared_servers(self, ctx: Context) -> Sequence[McpServer]:
        async with self._lock:
            if not self._shared or any(server.has_ended for server in self._shared):
                await _stop(self._shared)
                self._shared = self._made(ctx)
                await _start(self._shared)
            return self._shared

    def _made(self, ctx: Context) -> list[McpServer]:
        return [McpServer(name, given, self._start_timeout_s, ctx.count) for name, given in self._commands.items()]


def with_unique_names(tools: Sequence[McpTool], taken: Sequence[str] = ()) -> list[McpTool]:
    """Rename tools of the same name to server_name."""
    times = Counter([*taken, *(tool.name for tool in tools)])
    return [tool if times[tool.name] == 1 else tool.renamed(f"{tool.server.name}_{tool.name}") for tool in tools]


async def _start(servers: Sequence[McpServer]) -> None:
    for found in await asyncio.gather(*(server.start() for server in servers), return_exceptions=True):
        if isinstance(found, BaseException):
            raise found


async def _stop(servers: Sequence[McpServer]) -> None:
    await asyncio.gather(*(server.stop() for server in servers))


def _command(name: str, given: Mapping[str, Any]) -> McpCommand | McpAddress:
    key, known = f"environment.options.servers.{name}", ("url", "headers") if "url" in given else COMMAND
    for option in given:
        if option not in known:
            raise ConfigError(f"{key}.{option}: a server has no such option{suggest(option, known)}")
    if "url" in given:
        if not str(given["url"]).startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url={given['url']}: an MCP server's address begins with http:// or https://.")
        return McpAddress(str(given["url"]), {str(one): str(two) for one, two in (given.get("headers") or {}).items()})
    if shutil.which(str(given.get("command"))) is None:
        raise ConfigError(
            f"{key}.command={given.get('command')}: there is no such program. Install it, or name its path."
        )
    environment = {str(word): str(value) for word, value in (given.get("env") or {}).items()}
    return McpCommand(str(given["command"]), tuple(map(str, given.get("args") or ())), environment)
