"""Tasks that are solved with the tools of MCP servers: over stdio, each in a process of its own, or over HTTP."""

import asyncio
import importlib
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from penstock.conf.errors import ConfigError, suggest
from penstock.workers.environments.adapters.tools import Tools
from penstock.workers.environments.context import Context
from penstock.workers.environments.environment import environment
from penstock.workers.environments.mcp_connection import McpAddress
from penstock.workers.environments.mcp_server import McpCommand, McpServer, McpTool
from penstock.workers.environments.task import Task
from penstock.workers.environments.toolbox import DescribedFunction

COMMAND = ("command", "args", "env")
"""Options of a server of one's own."""


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
