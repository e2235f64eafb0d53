"""Debian's Prometheus, started on a free port for a test, and asked over its HTTP API."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

START_S = 300.0


def needed(program: str) -> str:
    """Where it is; without it the test has failed."""
    path = shutil.which(program)
    if path is None:
        pytest.fail(f"there is no {program}: `make verify` installs it", pytrace=False)
    return path


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series that it answers with: `metric` and `value`. Raises what it refuses a query with."""
        answer = self._get("query", query=query)
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["data"]["groups"] for rule in group["rules"]]

    def _get(self, what: str, **words: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(words)}", timeout=10) as page:
            return dict(json.load(page))


@contextmanager
def running(settings: Path, folder: Path) -> Iterator[Prometheus]:
    """`settings`: its prometheus.yml. `folder`: for its data."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [needed("prometheus"), f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://{address}/-/ready", process, folder / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(START_S)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    pytest.fail(f"prometheus does not serve: {log.read_text()[-2000:]}")
