"""`penstock ui`: serves the page until it is interrupted."""

import secrets
import socket
import tempfile
from pathlib import Path

import uvicorn
from rich.console import Console

from penstock.conf.errors import ConfigError
from penstock.orchestrator.observability.ui.runs.far import Copy
from penstock.orchestrator.observability.ui.server.app import make_app
from penstock.workers.files import is_url

PORT = 8420
NUM_PORTS = 20
"""Number of ports tried from PORT on, unless one is asked for."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
GRACE_S = 2
"""Seconds for open pages when the server ends."""


def serve(
    place: str, console: Console, host: str = "127.0.0.1", port: int | None = None, key: str | None = None
) -> None:
    """Serve the page. `port`: None for the first that is free; 0 for any. `key`: the one that visitors need; where
    others than this machine can reach the page, there is one in any case. Raises `ConfigError`, `CheckpointError` for a
    URL that does not answer."""
    if is_url(place):
        with tempfile.TemporaryDirectory(prefix="penstock-ui-") as folder, Copy(place, Path(folder)).follow():
            _serve(Path(folder), place, console, host, port, key)
        return
    directory = Path(place).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"{place}: there is no such directory. Name one with runs in it, or a run: `penstock ui runs`."
        )
    _serve(directory, place, console, host, port, key)


def _serve(directory: Path, place: str, console: Console, host: str, port: int | None, key: str | None) -> None:
    """Serve a directory. `place`: its name for people."""
    if key is None and host not in LOOPBACK:
        key = secrets.token_urlsafe(16)
    bound = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{bound.getsockname()[1]}/" + (f"?key={key}" if key else "")
    console.print(f"[bold]{place}[/] at {address}", highlight=False, soft_wrap=True)
    console.print("Ctrl-C ends it.", style="dim")
    config = uvicorn.Config(
        make_app(directory, key), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S
    )
    with bound:
        uvicorn.Server(config).run([bound])


def listen(host: str, port: int | None) -> socket.socket:
    """Listen on a port. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for one in range(PORT, PORT + NUM_PORTS) if port is None else [port]:
        try:
            return socket.create_server((host, one), family=family)
        except OSError as error:
            problem = error
    tried = f"{PORT} to {PORT + NUM_PORTS - 1}" if port is None else f"{port}"
    raise ConfigError(f"port {tried} of {host}: {problem.strerror}. Choose another: --port N, or --port 0 for any.")
