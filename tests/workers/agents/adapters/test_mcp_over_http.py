"""Tools of MCP servers that run elsewhere, over HTTP: real servers on loopback, which die and have keys."""

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.trajectory import COMPLETED, FAILED
from tests.workers.agents.adapters.adapted import adapter, heard, played

ROW = {"prompt": "?", "answer": "4"}
WAIT_S = 60.0


def served(url: str, **server: Any) -> Any:
    return adapter("mcp", servers={"notes": {"url": url, **server}}, reward=None, start_timeout_s=20.0)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.fixture
def notes() -> Iterator[Callable[[], tuple[str, subprocess.Popen[bytes]]]]:
    """Start a server; its address and process."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[str, subprocess.Popen[bytes]]:
        port, file = free_port(), Path(__file__).parent / "notes_server.py"
        started.append(subprocess.Popen([sys.executable, str(file), str(port)], stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return f"http://127.0.0.1:{port}/mcp", started[-1]
            except OSError:
                assert time.monotonic() < deadline
                assert started[-1].poll() is None
                time.sleep(0.05)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.real
def test_a_remote_servers_tools_are_the_models(notes: Callable[[], tuple[str, Any]]) -> None:
    url, _ = notes()
    attempt, counts = played(served(url), ROW, ["[keep('a')]", "[divide(1,0)]", "[picture()]", "4"])
    assert attempt.outcome.kind == COMPLETED
    assert heard(attempt, "tool") == [
        "a", "Error: McpFailed: Error executing tool divide", "[image/png, 33 bytes that are no text]"
    ]  # fmt: skip
    assert (counts["tools"], counts["tools_raised"]) == (3, 1)


@pytest.mark.real
def test_a_connection_that_is_lost_is_told_and_the_attempt_goes_on(notes: Callable[[], tuple[str, Any]]) -> None:
    url, process = notes()
    environment = served(url)

    def kill(note: str) -> str:
        """End the server."""
        process.kill()
        process.wait()
        return note

    environment.tools.append(kill)
    attempt, counts = played(environment, ROW, ["[keep('a')]", "[kill('b')]", "[keep('c')]", "[keep('d')]", "4"])
    first, _, lost, gone = heard(attempt, "tool")
    assert first == "a"
    assert f"the MCP server notes: the connection to {url} is lost" in lost
    assert f"the MCP server notes: the connection to {url} is lost" in gone
    assert attempt.outcome.kind == COMPLETED
    assert counts["mcp_died"] == 1


def test_a_server_that_is_not_there_fails_the_attempt_and_says_where() -> None:
    url = f"http://127.0.0.1:{free_port()}/mcp"
    attempt, counts = played(served(url), ROW, ["4"])
    assert attempt.outcome.kind == FAILED
    assert "the MCP server notes could not be started" in attempt.outcome.detail
    assert "ConnectError" in attempt.outcome.detail
    assert url in attempt.outcome.detail
    assert counts["mcp_not_started"] == 1


def test_headers_are_sent_and_those_of_the_environment_are_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    heard_headers: list[str | None] = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard_headers.extend([self.headers["authorization"], self.headers["x-team"]])
            self.send_error(401)

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setenv("NOTES_KEY", "Bearer 17")
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/mcp"
        attempt, _ = played(served(url, headers={"Authorization": "$NOTES_KEY", "X-Team": "a"}), ROW, ["4"])
        server.shutdown()
    assert heard_headers[:2] == ["Bearer 17", "a"]
    assert attempt.outcome.kind == FAILED


def test_a_header_of_a_variable_that_is_not_set_fails_the_attempt_by_name() -> None:
    attempt, _ = played(served("http://127.0.0.1:1/mcp", headers={"Authorization": "$NO_SUCH_KEY"}), ROW, ["4"])
    assert attempt.outcome.kind == FAILED
    assert "its header Authorization is $NO_SUCH_KEY, and this node has no such environment" in attempt.outcome.detail


@pytest.mark.parametrize(("server", "said"), [
    ({"url": "tools.example/mcp"}, r"servers\.a\.url=tools\.example/mcp: .* begins with http"),
    ({"url": "https://tools.example/mcp", "args": []}, r"servers\.a\.args: a server has no such option"),
])  # fmt: skip
def test_addresses_that_cannot_be_are_refused(server: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapter("mcp", servers={"a": server})
