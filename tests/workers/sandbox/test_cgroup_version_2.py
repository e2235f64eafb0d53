"""Control groups of version 2, in a recorded tree of it: no machine with memory in version 2 has been seen yet.

The files, and which writes are refused how, are those of Linux 6.18 (cgroup2 with the controller hugetlb); the files of
memory and pids are those of its Documentation/admin-guide/cgroup-v2.rst.
"""

import errno
import os
import sys
from pathlib import Path

import pytest

from penstock.workers.sandbox import cgroup
from penstock.workers.sandbox.cgroup import Cgroup, parents
from penstock.workers.sandbox.execution import MIB, Limits

GIVEN = {
    "": ("cgroup.procs", "cgroup.controllers", "cgroup.subtree_control", "cgroup.events"),
    "memory": ("memory.max", "memory.current", "memory.swap.max"),
    "pids": ("pids.max", "pids.current"),
}
STAT = "usage_usec 1250000\nuser_usec 1000000\nsystem_usec 250000\nnice_usec 0\n"
EVENTS = "low 0\nhigh 0\nmax 41\noom 2\noom_kill 2\noom_group_kill 0\n"
LIMITS = Limits(memory_bytes=256 * MIB, num_processes=16)


class Tree:
    """A cgroup2 file system in a directory. A test gives it groups, and asks it for what was written."""

    def __init__(self, top: Path, controllers: str = "cpu io memory pids") -> None:
        self.top = top
        self._populate(top, controllers)

    def group(self, path: str, processes: str = "", divides: str = "") -> Path:
        directory = self.top / path
        self.mkdir(directory)
        if divides:
            self.write(directory / "cgroup.subtree_control", divides)
        (directory / "cgroup.procs").write_text(processes)
        return directory

    def mkdir(self, directory: Path) -> None:
        directory.mkdir()
        self._populate(directory, (directory.parent / "cgroup.subtree_control").read_text())

    def write(self, file: Path, value: object) -> None:
        if not file.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        if file.name == "cgroup.subtree_control":
            words = {word.lstrip("+") for word in str(value).split()}
            if not words <= set((file.parent / "cgroup.controllers").read_text().split()):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
            if file.parent != self.top and (file.parent / "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(file))
            value = " ".join(sorted(words | set(file.read_text().split())))
        file.write_text(str(value))

    def _populate(self, directory: Path, controllers: str) -> None:
        for controller in ["", *controllers.split()]:
            for name in GIVEN.get(controller, ()):
                (directory / name).write_text("")
        (directory / "cgroup.controllers").write_text(controllers)
        (directory / "cpu.stat").write_text(STAT)
        if "memory" in controllers.split():
            (directory / "memory.events").write_text(EVENTS)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    tree = Tree(tmp_path)
    monkeypatch.setattr(cgroup, "_mkdir", tree.mkdir)
    monkeypatch.setattr(cgroup, "_write", tree.write)
    monkeypatch.setattr(cgroup, "_removed", lambda directory: True)
    monkeypatch.setattr(cgroup, "_sweep", lambda parent: None)
    monkeypatch.setattr(cgroup, "RUNNING", tmp_path / "no-systemd")
    return tree


def lives_in(monkeypatch: pytest.MonkeyPatch, tree: Tree, own: Path) -> None:
    monkeypatch.setattr(cgroup, "own_group", lambda controller: None if controller else (own, tree.top))


def settings(group: Cgroup) -> tuple[str, str, str]:
    (directory,) = group.directories
    return tuple((directory / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max"))  # type: ignore[return-value]


def test_a_group_without_processes_is_divided(tree, monkeypatch):
    tree.write(tree.top / "cgroup.subtree_control", "+memory +pids")
    own = tree.group("own")
    lives_in(monkeypatch, tree, own)
    group = Cgroup.around(7, LIMITS)
    assert group.directories[0].parent == own
    assert settings(group) == (str(288 * MIB), "0", "20")
    assert (group.directories[0] / "cgroup.procs").read_text() == "7"
    assert (group.num_killed(), group.cpu_s()) == (2, 1.25)
    group.remove()
    assert (group.num_killed(), group.cpu_s()) == (0, None)


def test_the_root_of_a_machine_is_divided_though_it_has_processes(tree, monkeypatch):
    (tree.top / "cgroup.procs").write_text("1\n7\n")
    lives_in(monkeypatch, tree, tree.top)
    assert Cgroup.around(7, LIMITS).directories[0].parent == tree.top


def test_beside_a_group_with_processes_if_the_one_above_is_divided(tree, monkeypatch):
    """A leaf that somebody has made for the container's own processes, or `DelegateSubgroup` of a service."""
    tree.write(tree.top / "cgroup.subtree_control", "+memory +pids")
    above = tree.group("penstock.service", divides="+memory +pids")
    lives_in(monkeypatch, tree, tree.group("penstock.service/main", processes="7\n"))
    assert Cgroup.around(7, LIMITS).directories[0].parent == above


def test_a_group_with_processes_of_its_own_says_that_it_gives_no_memory(tree, monkeypatch):
    tree.write(tree.top / "cgroup.subtree_control", "+memory +pids")
    tree.group("user.slice", divides="+memory +pids")
    lives_in(monkeypatch, tree, tree.group("user.slice/session-3.scope", processes="7\n"))
    with pytest.raises(
        OSError, match=r"session-3.scope does not give memory .*\(Device or resource busy\); there is no"
    ):
        Cgroup.around(7, LIMITS)
    assert [path.name for path in (tree.top / "user.slice").iterdir() if path.is_dir()] == ["session-3.scope"]


def test_a_group_that_is_given_no_memory_says_so(tree, monkeypatch):
    lives_in(monkeypatch, tree, tree.group("own", processes="7\n"))
    monkeypatch.setattr(cgroup, "parents", lambda own, top, is_systemds: [own])
    with pytest.raises(OSError, match="own is not given the controllers memory and pids"):
        Cgroup.around(7, LIMITS)


@pytest.mark.parametrize(
    ("own", "is_systemds", "found"),
    [
        ("", True, [""]),
        ("main", False, ["main", ""]),
        ("init.scope", True, ["init.scope"]),
        ("user.slice/session-3.scope", True, ["user.slice/session-3.scope"]),
        ("user.slice/session-3.scope", False, ["user.slice/session-3.scope"]),
        ("a.service/main", True, ["a.service/main", "a.service"]),
    ],
)
def test_what_systemd_alone_divides_is_left_to_it(own, is_systemds, found):
    top = Path("/sys/fs/cgroup")
    assert list(parents(top / own, top, is_systemds)) == [top / path for path in found]


BUSCTL = """#!{python}
import pathlib, sys
pathlib.Path({told!r}).write_text("\\n".join(sys.argv[1:]))
{rest}
"""


@pytest.fixture
def systemd(tree, tmp_path, monkeypatch):
    """A machine that systemd runs on, whose `busctl` does what it is told to here."""
    programs = tmp_path / "programs"
    programs.mkdir()
    told = programs / "told"

    def answers(rest: str) -> Path:
        (programs / "busctl").write_text(BUSCTL.format(python=sys.executable, told=str(told), rest=rest))
        (programs / "busctl").chmod(0o755)
        return told

    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr(cgroup, "RUNNING", programs)
    monkeypatch.setattr(cgroup, "ANSWER_S", 60.0)  # a busy machine takes its time to start a program
    tree.write(tree.top / "cgroup.subtree_control", "+memory +pids")
    tree.group("user.slice", divides="+memory +pids")
    lives_in(monkeypatch, tree, tree.group("user.slice/session-3.scope", processes="7\n"))
    return answers


@pytest.mark.real
def test_systemd_is_asked_for_a_scope_where_no_group_may_be_made(systemd, tree, monkeypatch):
    told = systemd("")
    made = tree.group("user.slice/penstock.scope")
    monkeypatch.setattr(cgroup, "wait_in_scope", lambda pid, name, top: made)
    group = Cgroup.around(4711, LIMITS)
    assert group.directories == [made]
    assert (made / "cgroup.procs").read_text() == "", "systemd has put the process there"
    words = told.read_text().split("\n")
    assert words[0] == ("--system" if os.geteuid() == 0 else "--user")
    assert words[words.index("StartTransientUnit") + 2] == f"penstock-sandbox-{os.getpid()}-4711.scope"
    for entry in (["PIDs", "au", "1", "4711"], ["MemoryMax", "t", str(288 * MIB)], ["TasksMax", "t", "20"]):
        at = words.index(entry[0])
        assert words[at : at + len(entry)] == entry
    assert words[words.index("fail") + 1] == "6", "so many properties"


@pytest.mark.real
def test_a_systemd_that_refuses_is_quoted(systemd):
    systemd("sys.exit('Interactive authentication required.')")
    with pytest.raises(OSError, match=r"resource busy.*systemd made no scope: Interactive authentication required"):
        Cgroup.around(4711, LIMITS)


@pytest.mark.real
def test_a_systemd_that_does_not_do_what_it_says_is_not_waited_for(systemd, monkeypatch):
    systemd("")
    monkeypatch.setattr(cgroup, "ANSWER_S", 1.0)
    with pytest.raises(OSError, match=r"systemd has put no process into penstock-sandbox|did not answer for 1 s"):
        Cgroup.around(os.getpid(), LIMITS)
