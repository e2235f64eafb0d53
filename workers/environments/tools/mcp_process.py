"""The process of an MCP server, and messages over its stdin and stdout.

Ours, as the transport of the `mcp` package neither says which process it has started nor ends what that one has started
where it ends by itself. Used by `mcp_server.py`.
"""

import asyncio
import importlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

SOON_S = 0.1
"""For a process to end whose streams may have ended."""
LEAVE_S = 1.0
"""For a server to end by itself when its stdin is closed; then it is killed."""
MAX_LINE_BYTES = 2**24
"""Of one message."""
MAX_TAIL = 300
"""Bytes of stderr that are told where a server fails."""


@dataclass(frozen=True)
class McpCommand:
    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside PATH, HOME and a few more: a server does not see this process's keys."""


class McpProcess:
    """Lifecycle: `start`, `messages`, `end`, after which its whole process group is gone."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stderr = b""
        self._listening = asyncio.create_task(self._hear_errors())

    @classmethod
    async def start(cls, command: McpCommand) -> "McpProcess":
        """Raises `OSError`."""
        inherited = importlib.import_module("mcp.client.stdio").get_default_environment()
        return cls(
            await asyncio.create_subprocess_exec(
                command.command, *command.args, env={**inherited, **command.env}, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
            )
        )  # fmt: skip

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @asynccontextmanager
    async def messages(self) -> AsyncIterator[Any]:
        """Two streams, as the package's clients take them. What is to be read ends with the process."""
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

    async def end(self) -> None:
        """It may end by itself first, if it does so soon. What it has started ends with it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            await self.ended(LEAVE_S)
        finally:
            self._kill()
            self._listening.cancel()
        await self.ended(LEAVE_S)
        self._process._transport.close()  # type: ignore[attr-defined]  # of pipes that nobody reads any more

    def kill(self) -> None:
        if not self.has_ended:
            self._kill()

    async def epitaph(self, timeout_s: float = SOON_S) -> str:
        """How it has ended, and what it said last, in words. `timeout_s`: its streams end before itself."""
        await self.ended(timeout_s)
        said = self._stderr.decode(errors="replace").strip()
        code = self._process.returncode
        return ("it does not answer" if code is None else f"it has ended with {code}") + (
            f"; it said last: {said}" if said else ""
        )

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ended(self, timeout_s: float | None = None) -> None:
        """Or so many seconds later. Not `process.wait()`, which waits for the ends of pipes as well, that its children
        may hold."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.has_ended:
                    await asyncio.sleep(0.01)

    async def _hear(self, heard: Any) -> None:
        message = importlib.import_module("mcp.shared.message").SessionMessage
        read_json = importlib.import_module("mcp_types").jsonrpc_message_adapter.validate_json
        assert self._process.stdout is not None
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
            async with heard:
                while line := await self._line():
                    try:
                        await heard.send(message(read_json(line, by_name=False)))
                    except ValueError as error:  # servers print to where they should not
                        await heard.send(error)

    async def _line(self) -> bytes:
        """Nothing at the end, and for a line without one."""
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.readline()
        except ValueError:
            self._kill()
            return b""

    async def _say(self, to_say: Any) -> None:
        assert self._process.stdin is not None
        with suppress(anyio.ClosedResourceError, ConnectionError):
            async for said in to_say:
                text = said.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._process.stdin.write(text.encode() + b"\n")
                await self._process.stdin.drain()

    async def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        while said := await self._process.stderr.read(4096):
            self._stderr = (self._stderr + said)[-MAX_TAIL:]
