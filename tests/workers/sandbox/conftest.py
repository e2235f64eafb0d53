"""Workspaces for a file of tests, in an event loop of their own."""

import asyncio
import subprocess
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.workers.sandbox.execution import ProgramOutcome
from penstock.workers.sandbox.workspace import Workspace, Workspaces

T = TypeVar("T")


class Room:
    """A loop with workspaces of one tree."""

    def __init__(self, source: Path, **options: Any) -> None:
        self.source, self.options = source, options
        self.loop = asyncio.new_event_loop()
        self.workspaces = Workspaces()
        self.stack = AsyncExitStack()

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    def open(self, **options: Any) -> Workspace:
        return self.do(self.stack.enter_async_context(self.workspaces.open(self.source, **self.options, **options)))

    def run(self, workspace: Workspace, command: str, timeout_s: float | None = None) -> ProgramOutcome:
        return self.do(workspace.run(command, timeout_s))

    def close(self) -> None:
        self.do(self.stack.aclose())
        self.do(self.workspaces.close())
        self.loop.close()


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree as repositories are: text, a program, a link, and files without an end of line or in bytes."""
    tree = tmp_path_factory.mktemp("repository")
    (tree / "package").mkdir()
    (tree / "package" / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    (tree / "data").mkdir()
    for name in ("one", "two", "three"):
        (tree / "data" / name).write_text(f"{name}\n" * 20)
    (tree / "binary").write_bytes(bytes(range(256)))
    (tree / "no end").write_text("first\nlast")
    (tree / "link").symlink_to("package/sums.py")
    (tree / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (tree / "tool.sh").chmod(0o755)
    return tree


@pytest.fixture(scope="module")
def room(repository: Path) -> Iterator[Room]:
    room = Room(repository)
    yield room
    room.close()


@pytest.fixture
def ws(room: Room) -> Iterator[Workspace]:
    workspace = room.open()
    yield workspace
    workspace.close()


def git(directory: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=directory, check=True, capture_output=True, text=True).stdout
