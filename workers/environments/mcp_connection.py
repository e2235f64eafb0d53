"""The connection to a server of tools that runs elsewhere, and speaks the Model Context Protocol over HTTP.

    McpServer("search", McpAddress("https://tools.example/mcp", {"Authorization": "$SEARCH_KEY"}), start_timeout_s=30)

It stands where the process of a server of one's own stands (`mcp_server.py`). What ends is the connection.
"""

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.conf.secret import hide_in
from penstock.workers.environments.child import SOON_S


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
