"""`penstock serve` in a process of its own, and loops through the SDK that is installed here."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

START_S = 240.0
"""Deadline for the server to listen."""
END_S = 120.0
KEY = "tml-test"


class Served:
    """A server that has started. Lifecycle: `start`, `kill` and `start` again any number of times, `end`."""

    def __init__(self, directory: Path, words: Sequence[str], python: Sequence[str], cluster: str) -> None:
        self.directory, self.words, self.python = directory, list(words), python
        key = {} if any("serve.tenants" in word for word in words) else {"TINKER_API_KEY": KEY}
        self._environment = os.environ | {"COLUMNS": "400"} | key | ({"RAY_ADDRESS": cluster} if cluster else {})
        self.lines: list[str] = []
        """Lines that it printed."""
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        """Start, and wait for the address, which stays the same. Returns it."""
        port = self.url.rpartition(":")[2] or "0"
        words = [*self.words, f"output_dir={self.directory}", "--port", port]
        process = subprocess.Popen(
            [*self.python, "-m", "penstock.cli.main", "serve", *words], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, cwd=self.directory, env=self._environment,
            start_new_session=True,
        )  # fmt: skip
        self._process, found = process, queue.Queue[str]()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                self.lines.append(line.rstrip())
                if "TINKER_BASE_URL=" in line:
                    found.put(line.partition("TINKER_BASE_URL=")[2].split()[0])
            found.put("")

        threading.Thread(target=read, daemon=True).start()
        self.url = found.get(timeout=START_S) or self.url
        assert process.poll() is None, "\n".join(self.lines[-40:])
        return self.url

    def members(self, word: str) -> list[psutil.Process]:
        """Processes of the cluster whose title has a word, such as `Trainer`."""
        return [process for process in self._family() if process.info["name"].startswith(f"ray::{word}")]

    @property
    def process(self) -> psutil.Process:
        """The process that listens, which a warm one may have forked."""
        port = int(self.url.rpartition(":")[2])
        sockets = psutil.net_connections("tcp")
        pids = {one.pid for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.port == port}
        assert len(pids) == 1, "\n".join([f"{len(pids)} processes listen at {self.url}", *self.lines[-40:]])
        return psutil.Process(*pids)

    def _family(self) -> list[psutil.Process]:
        """The server and all that it started: nobody else works in its directory. Warm processes have other parents."""
        named = psutil.process_iter(["cwd", "name"])
        return [process for process in named if process.info["cwd"] == str(self.directory)]

    def kill(self) -> None:
        """Kill the server with all that it started, as a machine that loses its power."""
        assert self._process is not None
        family = self._family()
        self._process.kill()
        self._process.wait(END_S)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, END_S)

    def end(self) -> None:
        """Have it drain and end."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(END_S) == 0, "\n".join(self.lines[-40:])


@contextlib.contextmanager
def served(
    directory: Path, words: Sequence[str], python: Sequence[str] = (sys.executable,), cluster: str = ""
) -> Iterator[Served]:
    """Start a server, and leave no process of it behind.

    `python`: what runs it, by default as for users. `cluster`: address of the Ray cluster that it uses; by default it
    starts its own, which `kill` ends with it.
    """
    server = Served(directory, words, python, cluster)
    try:
        server.start()
        yield server
        server.end()
    except BaseException:
        print("\n".join(server.lines[-60:]))
        with contextlib.suppress(Exception):
            server.kill()
        raise


def client(server: Served, key: str = KEY) -> Any:
    """The SDK's client of a server."""
    import tinker

    return tinker.ServiceClient(base_url=server.url, api_key=key)
