"""Control groups, where this process may make them; and what stands in for them elsewhere."""

import errno
import os
import socket
import subprocess
import sys

import psutil
import pytest

from penstock.workers.sandbox import cgroup
from penstock.workers.sandbox.cgroup import Cgroup, descendants, memory_of, num_sockets, times_of
from penstock.workers.sandbox.execution import Limits


def test_without_a_hierarchy_there_is_no_group_and_it_says_why(monkeypatch):
    monkeypatch.setattr(cgroup, "_mounts", lambda: iter(()))
    with pytest.raises(OSError, match="no hierarchy of control groups is mounted"):
        Cgroup.make(os.getpid(), Limits())


def version_1(tmp_path, monkeypatch, *controllers):
    """A recorded tree, in which a new group has the files of its hierarchy."""
    files = {"memory": {"memory.limit_in_bytes": "", "memory.oom_control": "oom_kill 3\n", "cgroup.procs": ""}}
    files |= {"pids": {"pids.max": ""}, "cpuacct": {"cpuacct.usage": "2500000000\n"}}

    def mkdir(directory):
        directory.mkdir()
        for name, content in files[directory.parent.name].items():
            (directory / name).write_text(content)

    for controller in controllers:
        (tmp_path / controller).mkdir()
    own = {controller: (tmp_path / controller, tmp_path) for controller in controllers}
    monkeypatch.setattr(cgroup, "own_group", own.get)
    monkeypatch.setattr(cgroup, "_mkdir", mkdir)
    monkeypatch.setattr(cgroup, "_removed", lambda directory: True)


def test_version_1_holds_memory_and_counts_processor_time(tmp_path, monkeypatch):
    version_1(tmp_path, monkeypatch, "memory", "pids", "cpuacct")
    group = Cgroup.around(7, Limits())
    assert [directory.parent.name for directory in group.directories] == ["memory", "pids", "cpuacct"]
    assert (group.num_killed(), group.cpu_s()) == (3, 2.5)
    assert not (group.directories[0] / "memory.memsw.limit_in_bytes").exists()
    group.remove()


def test_version_1_without_cpuacct_says_that_it_counts_no_time(tmp_path, monkeypatch):
    version_1(tmp_path, monkeypatch, "memory")
    group = Cgroup.around(7, Limits())
    assert (group.num_killed(), group.cpu_s()) == (3, None)
    group.remove()


def test_a_group_that_cannot_be_made_leaves_nothing(monkeypatch, tmp_path):
    """A hierarchy that may not be written to, as in a container."""

    def refused(file, value):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    monkeypatch.setattr(
        cgroup, "own_group", lambda controller: (tmp_path, tmp_path) if controller == "memory" else None
    )
    monkeypatch.setattr(cgroup, "_write", refused)
    with pytest.raises(OSError, match=r"Read-only file system: .*limit_in_bytes"):
        Cgroup.make(os.getpid(), Limits())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_groups_of_processes_that_are_gone_are_swept(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = cgroup._pid_namespace()
    gone, own, of_others = f"{here}-{ended.pid}-0a", f"{here}-{os.getpid()}-0a", f"{here + 1}-{ended.pid}-0a"
    for name in (gone, own, of_others):
        (tmp_path / f"{cgroup.NAME}-{name}").mkdir()
    cgroup._sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{cgroup.NAME}-{own}", f"{cgroup.NAME}-{of_others}"}


FIRST_PROCESS = """
import os, pathlib, sys
os.getpid = lambda: 1
from penstock.workers.sandbox import cgroup
cgroup._made(pathlib.Path(sys.argv[1]), {})
"""


@pytest.mark.real
def test_processes_of_the_same_id_make_groups_of_their_own(tmp_path):
    """The first processes of two containers that share a hierarchy have the same id."""
    for number in (1, 2):
        subprocess.run([sys.executable, "-c", FIRST_PROCESS, str(tmp_path)], check=True)
        assert len(list(tmp_path.iterdir())) == number


@pytest.mark.parametrize(
    ("controller", "kind", "options", "expected"),
    [
        ("memory", "cgroup", "rw,memory", True),
        ("memory", "cgroup", "rw,cpu,cpuacct", False),
        ("memory", "cgroup2", "rw", False),
        ("", "cgroup2", "rw,nsdelegate", True),
        ("", "cgroup", "rw,name=systemd", False),
    ],
)
def test_hierarchies_are_told_apart(controller, kind, options, expected):
    assert cgroup._is_of(controller, kind, options) is expected


@pytest.mark.real
def test_the_memory_of_descendants_is_seen():
    with subprocess.Popen(["sh", "-c", "sleep 30 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        children = descendants(shell.pid)
        assert children
        assert children[0] in descendants(os.getpid())
        assert memory_of(os.getpid()) > 1 << 20
        assert sum(map(memory_of, descendants(shell.pid))) < 1 << 20
        for started in psutil.Process(shell.pid).children():
            started.kill()
        shell.kill()
    assert memory_of(shell.pid) == 0
    assert times_of(shell.pid) is None


def test_processor_time_and_sockets_of_a_process_are_seen():
    (pid, _), (own, _) = times_of(os.getpid())
    assert pid == os.getpid()
    assert own > 0
    before = num_sockets(os.getpid())
    pairs = [socket.socketpair() for _ in range(200)]
    assert num_sockets(os.getpid()) > before  # others of this network come and go
    for pair in pairs:
        for end in pair:
            end.close()
