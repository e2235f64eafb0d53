"""Fails tests that leave their own process without the mark `real`.

An audit hook of Python sees each start of a process. In a test without the mark the call that would start one raises,
and the test fails even if it catches that. A test without the mark also fails if it uses a fixture that started a
process for an earlier test.
"""

import multiprocessing.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "penstock.spawn")
RULE = "is not marked `real` (CONTRIBUTING.md, Which tier a test is in), and "


class Starts:
    """Plugin of one test process, and the audit hook of this process."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        """Events since the process began."""
        self._watched = ""
        """Name of the running test, unless it is marked `real`."""
        self._processes_of: dict[Any, str] = {}
        """Fixtures that started a process, with the event."""

    def listen(self) -> None:
        """Install the audit hook, for good. `multiprocessing` raises no event of its own when it spawns a process."""
        spawn = multiprocessing.util.spawnv_passfds

        def audited(path: Any, arguments: Any, files: Any) -> int:
            sys.audit("penstock.spawn", path, arguments)
            return spawn(path, arguments, files)

        multiprocessing.util.spawnv_passfds = audited
        owner = os.getpid()
        sys.addaudithook(
            lambda event, arguments: event in EVENTS and os.getpid() == owner and self._hear(event, arguments)
        )

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.seen.append(f"{event}{str(arguments)[:200]}")
        if self._watched:
            pytest.fail(f"{self._watched} {RULE}starts a process: {self.seen[-1]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        known = len(self.seen)
        try:
            return (yield)
        finally:
            if len(self.seen) > known:
                self._processes_of[fixturedef] = self.seen[known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        self._watched = "" if item.get_closest_marker("real") else item.nodeid
        for name, definitions in item._fixtureinfo.name2fixturedefs.items():
            if self._watched and (event := self._processes_of.get(definitions[-1])):
                pytest.fail(f"{self._watched} {RULE}its fixture `{name}` has started a process: {event}")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        known = len(self.seen)
        result = yield
        if self._watched and len(self.seen) > known:  # the failure was caught, or raised in a thread
            pytest.fail(f"{self._watched} {RULE}starts a process: {self.seen[known]}")
        return result
