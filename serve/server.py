"""The server over HTTP: starts on a run directory, and ends without losing what it has taken.

server = Server(config, backend, directory)
url = await server.start()
await server.serve_until(stop)        # an event; then drain
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.conf.errors import PenstockError
from penstock.conf.serve import ServeConfig, hash_of
from penstock.metering.meters import Meters
from penstock.network.heads import BACKLOG, CONNECTIONS, Heads, listen
from penstock.network.machine import raise_limit
from penstock.serve.backend import Backend
from penstock.serve.endpoints.routes import routes
from penstock.serve.service import Service
from penstock.serve.status import status
from penstock.serve.tenants import OPERATOR, Tenants
from penstock.serve.wire.messages import messages
from penstock.workers.machine.local_files import write_whole

_LOG = logging.getLogger("penstock")
CLOSE_S, GRACE_S = 2.0, 2
"""Seconds beyond `serve.drain_s` for files to be closed, and for answers that are being written."""
START_S = 30.0


class ServerFailed(PenstockError):
    """A part of the server that has ended by a fault."""


class Server:
    """Lifecycle: `start`, `serve_until` or `drain`."""

    def __init__(
        self, config: ServeConfig, backend: Backend, directory: Path, key: str = "", meters: Meters | None = None
    ) -> None:
        """`directory`: in that of the run, which this process has locked; what another server has left there goes on.
        `key`: of the only tenant, or of the operator where there are tenants. `meters`: take what is measured. Raises
        `ConfigError`."""
        messages()
        self._meters = meters
        self._config, self._backend, self._directory = config, backend, directory
        self.key, self.key_file = key, directory / "key.sha256"
        """The key of the only tenant, or of the operator; empty: an earlier start has printed it."""
        self.service: Service | None = None
        self._http: _Http | None = None
        self._heads = Heads()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start; returns the address for TINKER_BASE_URL. Raises `ConfigError` if the port is in use."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        known = self.key_file.read_text() if self.key_file.exists() else ""
        tenants = Tenants(self._config, self.key, known, self._meters)
        is_made, self.key = tenants.key != self.key, tenants.key
        bound = listen(self._config.host, [self._config.port])
        self.service = Service(self._config, self._backend, self._directory, tenants)
        await self.service.open()
        config = uvicorn.Config(
            Starlette(routes=routes(self.service)), log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=60, backlog=BACKLOG,
            http=self._heads.before(H11Protocol), limit_concurrency=min(CONNECTIONS, raise_limit() // 2),
        )  # fmt: skip
        self._http = _Http(config)
        self._serving = asyncio.create_task(self._http.serve([bound]), name="HTTP")
        async with asyncio.timeout(START_S):
            while not self._http.started:
                await asyncio.sleep(0.01)
        if is_made:
            write_whole(self.key_file, hash_of(self.key), synced=True)
        host = self._config.host if self._config.host not in ("0.0.0.0", "::") else socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{bound.getsockname()[1]}"

    async def serve_until(self, stop: asyncio.Event, *beside: "asyncio.Task[None]") -> None:
        """Serve until the event is set, then drain. Raises `ServerFailed` once a part has ended, or a task beside."""
        assert self.service is not None
        assert self._serving is not None
        parts = [*self.service.loops, self._serving, *beside]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        ended = [(part.get_name(), part.exception()) for part in parts if part.done()]
        await self.drain()
        for name, error in ended:
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            raise ServerFailed(
                f"{name} has ended{why}. Start the server again with the same name=: it goes on with every client."
            ) from error

    async def drain(self) -> None:
        """End: take no more requests, finish those under way within `serve.drain_s`, write what adapters are. What is
        not done then is in the journals."""
        try:
            async with asyncio.timeout(self._config.drain_s + CLOSE_S):
                if self.service is not None:
                    await self.service.close()
        except TimeoutError:
            _LOG.warning("Not all files were closed within serve.drain_s and %g s. The next start goes on.", CLOSE_S)
        if self._http is not None and self._serving is not None:
            self._http.should_exit = True
            await asyncio.wait([self._serving], timeout=1.5 * GRACE_S)
            self._heads.close()

    def status(self) -> dict[str, Any]:
        """Tenants, their training clients, queues, and what each waits for, as plain data."""
        return status(self.service, OPERATOR) if self.service is not None else {}


class _Http(uvicorn.Server):
    """The HTTP server, which leaves signals to who runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
