"""The command: where it listens, and what it says when it cannot."""

import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import uvicorn
from rich.console import Console

from penstock.cli import main as cli
from penstock.conf.errors import ConfigError
from penstock.network.listener import listen
from penstock.ui.app import PORTS, serve
from tests.ui.made_runs import make_run


def test_a_port_in_use_is_told_and_another_found_where_none_was_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1: .*--port"):
            listen("127.0.0.1", [port])
    with listen("127.0.0.1", PORTS) as first, listen("127.0.0.1", PORTS) as second:
        assert PORTS[0] <= first.getsockname()[1] < second.getsockname()[1]


def test_a_directory_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ui", str(tmp_path / "nothing")]) == 2
    assert "there is no such directory" in capsys.readouterr().err


def test_beyond_loopback_visitors_need_the_key_that_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", "start")
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    console = Console(record=True, width=200)
    serve(str(tmp_path), console, "0.0.0.0", 0)
    assert "?key=" in console.export_text()
    serve(str(tmp_path), console, "127.0.0.1", 0)
    assert "?key=" not in console.export_text(clear=True).splitlines()[-2]
    serve(str(tmp_path), console, "0.0.0.0", 0, "a-secret")
    assert "a-secret" not in console.export_text()


def test_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run", "start", "end")
    servers: list[uvicorn.Server] = []
    start = uvicorn.Server.__init__

    def noted(self: uvicorn.Server, config: uvicorn.Config) -> None:
        start(self, config)
        servers.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", noted)
    monkeypatch.setattr(uvicorn.Server, "install_signal_handlers", lambda self: None, raising=False)
    console = Console(record=True, width=200)
    serving = threading.Thread(target=serve, args=(str(tmp_path), console, "127.0.0.1", 0))
    serving.start()
    deadline = time.monotonic() + 300
    while not (servers and servers[0].started) and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        address = console.export_text().split(" at ")[1].split()[0]
        with urllib.request.urlopen(f"{address}api/runs", timeout=10) as answer:
            assert b'"finished"' in answer.read()
    finally:
        servers[0].should_exit = True
        serving.join(30)
    assert not serving.is_alive()
