"""Control groups, where this process may make them; and what stands in for them elsewhere."""

import os
import subprocess

import pytest

from penstock.workers.sandbox import cgroup
from penstock.workers.sandbox.cgroup import Cgroup
from penstock.workers.sandbox.limits import Limits
from penstock.workers.sandbox.usage import descendants, memory_below, memory_of


def test_without_a_hierarchy_there_is_no_group(monkeypatch):
    monkeypatch.setattr(cgroup, "_mounts", lambda: iter(()))
    assert Cgroup.make(Limits()) is None


def test_a_group_that_cannot_be_made_leaves_nothing(monkeypatch, tmp_path):
    """Version 2, whose files are not there: the controllers are not given to this group."""
    parent = tmp_path / "own"
    parent.mkdir()
    monkeypatch.setattr(cgroup, "_own_group", lambda controller: parent if controller == "" else None)
    monkeypatch.setattr(cgroup, "_hierarchies", lambda limits: iter([(parent, {}), (tmp_path / "missing", {})]))
    assert Cgroup.make(Limits()) is None
    assert list(parent.iterdir()) == []


def test_groups_of_processes_that_are_gone_are_swept(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / f"{cgroup.NAME}-{pid}-0").mkdir()
    cgroup._sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{cgroup.NAME}-{os.getpid()}-0"]


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


def test_the_memory_of_descendants_is_seen():
    with subprocess.Popen(["sh", "-c", "sleep 30 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        children = descendants(shell.pid)
        assert children
        assert children[0] in descendants(os.getpid())
        assert memory_of(os.getpid()) > 1 << 20
        assert memory_below(shell.pid) < 1 << 20
        for pid in [*children, shell.pid]:
            os.kill(pid, 9)
    assert memory_of(shell.pid) == 0
