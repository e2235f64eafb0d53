"""Processor time of each test and fixture, including the processes that they start. Enabled by `PENSTOCK_COSTS=FILE`.

Each test process joins its own control group, and the processes that it starts inherit it. Forks of the warm server
(`warm_workers.py`) join the group of the process that requested them. The cost of a test or fixture is the difference
of its group's counter before and after. Processes that idle in the background, such as a Ray node, are charged to the
test that runs meanwhile.

`FILE` gets one line of JSON per test. The summary lists the most expensive files, tests and fixtures.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FILE = "PENSTOCK_COSTS"
GROUP = "PENSTOCK_COSTS_GROUP"
"""Environment variable: the control group that a process joins."""
HIERARCHIES = (("/sys/fs/cgroup/cpuacct", "cpuacct.usage"), ("/sys/fs/cgroup", "cpu.stat"))
NUM_SHOWN = 15


def join_group(group: str) -> None:
    """Charge this process, and all that it starts from now on, to a control group."""
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))


class Group:
    """Control group that counts processor time. Raises `pytest.UsageError` if it cannot be created."""

    def __init__(self, name: str) -> None:
        found = [(Path(root), figure) for root, figure in HIERARCHIES if (Path(root) / figure).exists()]
        if not found or os.getuid():
            raise pytest.UsageError(f"{FILE} needs root and control groups (/sys/fs/cgroup).")
        self._root, self._figure = found[0]
        self.path = self._root / name
        self.path.mkdir(exist_ok=True)
        join_group(str(self.path))

    def leave(self) -> None:
        """Move this process back to the root group, and remove the group if it is empty."""
        join_group(str(self._root))
        with suppress(OSError):
            self.path.rmdir()

    def cpu_s(self) -> float:
        said = (self.path / self._figure).read_text().split()
        return int(said[0]) / 1e9 if len(said) == 1 else int(said[1]) / 1e6


class Costs:
    """Plugin of one test process. The time of a test excludes that of its fixtures."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._group = Group(f"penstock-tests-{os.getpid()}")
        os.environ[GROUP] = str(self._group.path)
        self._fixtures: Counter[str] = Counter()
        self._written_s = 0.0

    def pytest_sessionfinish(self) -> None:
        self._write("imports and collection", self._group.cpu_s() - self._written_s)

    def pytest_unconfigure(self) -> None:
        self._group.leave()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before, within = self._group.cpu_s(), self._fixtures.total()
        try:
            return (yield)
        finally:
            spent = self._group.cpu_s() - before - (self._fixtures.total() - within)
            if spent > 0.001:
                self._fixtures[f"{fixturedef.argname} ({fixturedef.scope}, {fixturedef.baseid or 'tests'})"] += spent

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self._group.cpu_s()
        try:
            return (yield)
        finally:
            spent = self._group.cpu_s() - before - self._fixtures.total()
            self._write(item.nodeid, spent, sorted({mark.name for mark in item.iter_markers()}))

    def _write(self, name: str, spent: float, marks: Sequence[str] = ()) -> None:
        line = {"test": name, "cpu_s": spent, "fixtures": dict(self._fixtures), "marks": marks}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._written_s += spent + self._fixtures.total()
        self._fixtures.clear()


def summary(file: Path) -> Iterator[str]:
    """Lines of text: the most expensive files, tests and fixtures."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    fixtures: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for line in lines:
        fixtures.update(line["fixtures"])
        files[line["test"].partition("::")[0]] += line["cpu_s"] + sum(line["fixtures"].values())
    tests = Counter({line["test"]: line["cpu_s"] for line in lines})
    yield f"{files.total():.0f} s of processor time, {fixtures.total():.0f} s of them in fixtures"
    for name, costs in {"files": files, "tests": tests, "fixtures": fixtures}.items():
        yield f"the most expensive {name}:"
        yield from (f"  {spent:7.1f} s  {which}" for which, spent in costs.most_common(NUM_SHOWN))
