"""What a workspace does for who opens it: commands with state, files, differences, snapshots and forks."""

import asyncio
import errno
import os
import shutil
import signal
import tarfile
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError, InfrastructureError, NotStarted, SandboxUnavailable, WorkspaceError
from penstock.workers.sandbox import inside_workspace, workspace_worker
from penstock.workers.sandbox import workspace as workspace_module
from penstock.workers.sandbox.cgroup import descendants
from penstock.workers.sandbox.execution import MIB, Limits
from penstock.workers.sandbox.sandbox_worker import UsageMeter
from penstock.workers.sandbox.workspace import LIMITS, Snapshot, Workspace, Workspaces, checked_here
from tests.processes import GONE_S
from tests.sandbox.conftest import in_a_loop
from tests.workers.sandbox.conftest import Room, git

pytestmark = pytest.mark.real

CHANGES = """
sed -i s/-/+/ package/sums.py
rm -r data; mkdir data; echo other > data/one; echo new > data/new
chmod -x tool.sh; rm link; ln -s tool.sh link; printf 'first\\nother' > 'no end'
mkdir -p deep/er; echo x > deep/er/x; printf '\\000\\001' > binary
rm -rf package/__pycache__; mkdir binary.d; mkfifo pipe
"""
"""One of each kind of change."""


def tree_of(room: Room, workspace: Workspace) -> str:
    return room.run(
        workspace, "find . -type f -exec md5sum {} + -o -type l -printf '%p -> %l\\n' | sort; stat -c '%A %s' tool.sh"
    ).stdout


def test_commands_find_what_earlier_ones_have_left(room, ws):
    assert room.run(ws, "echo 1 > made; echo 2 > /tmp/made; exit 3").exit_code == 3
    assert room.run(ws, "pwd; cat made /tmp/made; cat -").stdout == "/workspace\n1\n2\n"
    assert room.do(ws.run("cat; echo e >&2", stdin="typed")).stdout == "typed"
    assert room.do(ws.run("echo e >&2")).stderr == "e\n"
    assert room.run(ws, "no-such-program").exit_code == 127


def test_python_runs_what_was_changed_in_the_same_second(room, ws):
    change = "printf 'print(%s)\\n' {} > fresh.py; touch -d @1700000000 fresh.py; python3 -c 'import fresh'"
    assert [room.run(ws, change.format(number)).stdout for number in (1, 2)] == ["1\n", "2\n"]


def test_the_original_stays_as_it_is(room, ws, repository):
    before = (repository / "package" / "sums.py").read_bytes()
    room.run(ws, "echo more >> package/sums.py; chmod 600 data/one; rm data/two")
    other = room.open()
    assert room.run(other, "cat package/sums.py; ls data").stdout == before.decode() + "one\nthree\ntwo\n"
    assert (repository / "package" / "sums.py").read_bytes() == before
    assert room.run(ws, "echo x > /original/package/sums.py").exit_code != 0


def test_files_are_read_and_written(room, ws):
    assert room.do(ws.read("package/sums.py")).startswith(b"def add")
    room.do(ws.write("new/directory/file", b"\0\xff"))
    assert room.do(ws.read("/workspace/new/directory/file")) == b"\0\xff"
    with pytest.raises(WorkspaceError, match="No such file"):
        room.do(ws.read("nothing"))
    room.run(ws, "mkfifo pipe")
    with pytest.raises(WorkspaceError, match="pipe is no file"):
        room.do(ws.read("pipe"))
    with pytest.raises(WorkspaceError, match="pipe is no file"):
        room.do(ws.write("pipe", b"x"))
    room.run(ws, "head -c 2000000 /dev/zero > long")
    with pytest.raises(WorkspaceError, match="more than 1,048,576 bytes"):
        room.do(ws.read("long"))


@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_a_difference_is_what_git_applies(repository, tmp_path, kind):
    room = Room(repository)
    room.workspaces.first_kind = kind
    ws = room.open()
    assert ws.kind == kind
    assert room.do(ws.diff()) == ""
    room.run(ws, CHANGES.replace("printf '\\000\\001' > binary", ":"))
    text = room.do(ws.diff())
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy, symlinks=True)
    git(copy, "init", "-q")
    (tmp_path / "patch").write_text(text)
    git(copy, "apply", str(tmp_path / "patch"))
    shutil.rmtree(copy / ".git")
    other = Room(copy)
    assert tree_of(other, other.open()) == tree_of(room, ws)
    room.run(ws, "printf '\\000\\001' > binary")
    assert "Binary files a/binary and b/binary differ" in room.do(ws.diff())
    room.close()
    other.close()


@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_a_fork_is_the_same_and_then_its_own(repository, kind):
    room = Room(repository)
    room.workspaces.first_kind = kind
    ws = room.open()
    room.run(ws, CHANGES + "echo kept > /tmp/kept")
    room.do(ws.shell().run("cd package; VARIABLE='a b'; export OTHER=1; greet() { echo hello; }"))
    fork = room.do(ws.fork())
    assert tree_of(room, fork) == tree_of(room, ws)
    assert room.do(fork.diff()) == room.do(ws.diff())
    assert room.run(fork, "cat /tmp/kept").stdout == "kept\n"
    asked = 'pwd; echo "$VARIABLE"; sh -c "echo \\$OTHER"; greet'
    assert room.do(fork.shell().run(asked)).stdout == "/workspace/package\na b\n1\nhello\n"
    room.run(fork, "echo more > data/one")
    assert room.run(ws, "cat data/one").stdout == "other\n"
    fork.close()
    room.close()


def test_a_snapshot_is_returned_to(room, ws):
    room.run(ws, CHANGES)
    before = tree_of(room, ws)
    snapshot = room.do(ws.snapshot())
    room.run(ws, "rm -rf * /tmp/*; echo x > y")
    room.do(ws.restore(snapshot))
    assert tree_of(room, ws) == before
    room.do(ws.restore(snapshot))
    assert tree_of(room, ws) == before


def test_times_and_modes_go_with_a_fork(room, ws):
    room.run(ws, "touch -d 2001-01-01 old; chmod 640 old; mkdir closed; echo x > closed/in; chmod 000 closed old")
    fork = room.do(ws.fork())
    assert room.run(fork, "stat -c %a:%Y old; chmod 700 closed; cat closed/in").stdout.endswith(":978307200\nx\n")


def test_a_shell_keeps_its_state_and_no_processes(room, ws):
    shell = room.do(ws.shell().run("cd data; export A=1; sleep 600 & B='x y'"))
    assert shell.exit_code == 0
    shell = ws.shell()
    assert room.do(shell.run('pwd; echo "$A$B"; ls /proc | grep -c "^[0-9]"; exit 4')).stdout.startswith(
        "/workspace/data\n1x y\n"
    )
    assert room.do(shell.run("cd ..; sleep 60", timeout_s=0.5)).reason == "timeout_wall"
    assert room.do(shell.run("pwd")).stdout == "/workspace/data\n"
    assert room.do(ws.shell("another").run("pwd; echo $A")).stdout == "/workspace\n\n"


def test_what_is_over_a_limit_ends_and_the_tree_stays(repository):
    room = Room(repository)
    limits = Limits(cpu_s=1, wall_s=60, memory_bytes=256 * MIB, tmp_bytes=32 * MIB, tmp_files=500)
    limits = replace(limits, file_bytes=64 * MIB)
    ws = room.open(limits=limits)
    room.run(ws, "echo 1 > mine")
    assert room.run(ws, "sleep 60", timeout_s=0.3).reason == "timeout_wall"
    assert room.run(ws, "while :; do :; done").reason == "timeout_cpu"
    assert room.run(ws, "for i in 1 2 3 4; do (while :; do :; done) & done; wait").reason == "timeout_cpu"
    hungry = "python3 -c 'x = bytearray(400 << 20); x[::4096] = b\"1\" * len(x[::4096])'"
    assert room.run(ws, hungry).reason == "memory" or "MemoryError" in room.run(ws, hungry).stderr
    assert "No space left" in room.run(ws, "head -c 100000000 /dev/zero > big").stderr
    assert "No space left" in room.run(ws, "rm big; i=0; while :; do i=$((i+1)); : > f$i || break; done").stderr
    room.run(ws, "rm -f f*")
    assert room.run(ws, "yes").reason in ("timeout_cpu", "output", "signal")
    assert room.run(ws, "cat mine").stdout == "1\n"
    assert descendants(ws.worker.keeper) == []
    room.close()


def test_sparse_files_take_no_more_when_packed_than_changes_may(repository):
    room = Room(repository)
    limits = Limits(memory_bytes=512 * MIB, tmp_bytes=16 * MIB, tmp_files=500, file_bytes=40 * MIB)
    ws = room.open(limits=limits)
    room.run(ws, "echo 1 > mine; truncate -s 30M a b")
    with pytest.raises(WorkspaceError, match="File too large"):
        room.do(ws.snapshot())
    assert room.run(ws, "rm a b; cat mine").stdout == "1\n"
    room.do(ws.snapshot())
    room.close()


def test_a_command_that_is_cancelled_ends_and_the_tree_stays(room, ws):
    async def cancelled() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await ws.run("echo 1 > started; sleep 600")

    room.do(cancelled())
    assert room.run(ws, "cat started; ls /proc | grep -c '^[0-9]'").exit_code == 0
    assert room.run(ws, "echo 2").stdout == "2\n"


def test_a_workspace_rests_by_itself(room, ws, monkeypatch):
    monkeypatch.setattr(workspace_module, "IDLE_S", 0.05)
    room.run(ws, "echo 1 > mine")

    async def rested() -> None:
        while "python" in Path(f"/proc/{ws.worker.keeper}/cmdline").read_bytes().split(b"\0")[0].decode():
            await asyncio.sleep(0.02)

    room.do(asyncio.wait_for(rested(), GONE_S))
    assert room.run(ws, "cat mine").stdout == "1\n"


def test_commands_at_once_wait_for_each_other(room, ws):
    async def all_of_them() -> list[str]:
        outcomes = await asyncio.gather(*(ws.run(f"cat count; echo {n} > count") for n in range(4)), ws.fork())
        outcomes[-1].close()
        return [outcome.stdout for outcome in outcomes[:-1]]

    assert room.do(all_of_them()) == ["", "0\n", "1\n", "2\n"]


def test_an_idle_workspace_keeps_no_interpreter_and_wakes(room, ws):
    room.run(ws, "echo 1 > mine")
    room.do(ws.shell().run("cd data"))
    keeper = ws.worker.keeper
    assert "python" in Path(f"/proc/{keeper}/cmdline").read_bytes().split(b"\0")[0].decode()
    for _ in range(2):
        ws.worker.rest()
        room.do(asyncio.sleep(0.3))
        assert Path(f"/proc/{keeper}/comm").read_text().strip() in ("sh", "dash", "bash", "busybox")
        assert room.run(ws, "cat mine").stdout == "1\n"
        assert room.do(ws.shell().run("pwd")).stdout == "/workspace/data\n"
    ws.worker.rest()
    fork = room.do(ws.fork())
    assert room.run(fork, "cat mine").stdout == "1\n"
    room.do(ws.restore(room.do(fork.snapshot())))


def test_a_request_that_was_cancelled_at_any_moment_confuses_no_later_one(room, ws):
    async def given_up() -> None:
        for number in range(40):
            if number % 4 == 0:
                ws.worker.rest()
            running = asyncio.create_task(ws.run(f"echo {number}"))
            await asyncio.sleep(number * 0.002)
            running.cancel()
            await asyncio.wait([running])
        assert (await ws.run("echo last")).stdout == "last\n"

    room.do(given_up())


def test_a_snapshot_that_is_cancelled_leaves_no_file(room, ws, monkeypatch):
    room.run(ws, "head -c 100000 /dev/zero > big")
    copied, begun, may_go_on = Snapshot.copied, threading.Event(), threading.Event()

    def slow(packed: Snapshot) -> Snapshot:
        begun.set()
        assert may_go_on.wait(GONE_S)
        return copied(packed)

    async def cancelled() -> None:
        snapshot = asyncio.create_task(ws.snapshot())
        await asyncio.to_thread(begun.wait, GONE_S)
        snapshot.cancel()
        await asyncio.wait([snapshot])
        may_go_on.set()
        async with asyncio.timeout(GONE_S):
            while memory_files() > before:
                await asyncio.sleep(0.02)

    before = memory_files()
    monkeypatch.setattr(Snapshot, "copied", slow)
    room.do(cancelled())
    monkeypatch.undo()
    assert room.do(ws.snapshot()).num_bytes > 100000


def memory_files() -> int:
    """Number of this process's files in memory."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(path).startswith("/memfd:")
    return found


def test_a_file_that_ends_early_is_an_error_and_is_closed(monkeypatch):
    before = memory_files()
    packed = Snapshot()
    os.write(packed.file, b"x")
    monkeypatch.setattr(workspace_module.os, "sendfile", lambda *_: 0)
    with pytest.raises(OSError, match="its changes were"):
        packed.copied()
    del packed
    assert memory_files() == before


def test_memory_without_attributes_of_files_holds_a_copy(tmp_path, monkeypatch):
    """As kernels before 6.6 have it."""
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "one").write_text("1")
    (tmp_path / "changes").mkdir()
    calls = []
    monkeypatch.setattr(inside_workspace, "checked", lambda *words: calls.append(words[:2]))
    monkeypatch.setattr(inside_workspace, "LOWER", str(tmp_path / "original"))
    monkeypatch.setattr(inside_workspace, "SPACE", str(tmp_path / "changes"))

    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "setxattr", refused)
    keeper = object.__new__(inside_workspace.WorkspaceKeeper)
    keeper.kind, keeper.at, keeper.tmp, keeper.start = "overlay", str(tmp_path / "at"), b"", ""
    keeper.mount_tree()
    os.close(keeper.upper)
    assert keeper.kind == "copy"
    assert ("mount", b"overlay") not in calls
    assert (tmp_path / "changes" / "upper" / "one").read_text() == "1"


@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_what_a_pipe_replaces_is_gone_in_a_fork(repository, kind):
    room = Room(repository)
    room.workspaces.first_kind = kind
    ws = room.open()
    room.run(ws, "rm tool.sh; mkfifo tool.sh; rm -r data; mkfifo data new")
    fork = room.do(ws.fork())
    assert room.run(fork, "ls").stdout.split() == ["binary", "link", "no", "end", "package"]
    assert room.do(fork.diff()) == room.do(ws.diff())
    fork.close()
    room.close()


def test_what_may_be_seen_is_shown_and_the_place_is_chosen(repository):
    room = Room(repository)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shown:
        Path(shown).chmod(0o755)
        (Path(shown) / "shown.py").write_text("value = 7\n")
        ws = room.open(at="/testbed/tree", show=[shown], variables={"PYTHONPATH": shown})
        outcome = room.run(ws, "pwd; python3 -c 'import shown; print(shown.value)'")
        assert outcome.stdout == "/testbed/tree\n7\n", outcome
        assert room.run(ws, f"touch {shown}/x").exit_code != 0
    room.close()


def test_archives_are_trees_too(repository, tmp_path):
    with tarfile.open(tmp_path / "tree.tar.gz", "w:gz") as archive:
        archive.add(repository, ".")
    room = Room(tmp_path / "tree.tar.gz")
    directory = Room(repository)
    assert tree_of(room, room.open()) == tree_of(directory, directory.open())
    room.close()
    directory.close()


@in_a_loop
async def test_what_cannot_be_a_workspace_is_refused_by_name(repository, tmp_path):
    workspaces = Workspaces()
    with pytest.raises(ConfigError, match="nothing: No such file"):
        await workspaces.open(tmp_path / "nothing").__aenter__()
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ConfigError, match="text cannot be unpacked"):
        await workspaces.open(tmp_path / "text").__aenter__()
    with pytest.raises(ConfigError, match="at='/tmp'"):
        await workspaces.open(repository, at="/tmp").__aenter__()
    with pytest.raises(ConfigError, match="lies below /tmp"):
        await workspaces.open(repository, show=["/tmp"]).__aenter__()
    with pytest.raises(ConfigError, match="tmp_bytes"):
        await workspaces.open(repository, limits=Limits(tmp_bytes=LIMITS.memory_bytes)).__aenter__()
    await workspaces.close()
    with pytest.raises(NotStarted):
        await workspaces.open(repository).__aenter__()


@in_a_loop
async def test_a_tree_that_is_being_read_at_the_end_is_removed(repository, monkeypatch):
    workspaces, may_go_on, of, found = Workspaces(), threading.Event(), workspace_module.OriginalTree.of, []

    def slow(*arguments: object) -> workspace_module.OriginalTree:
        assert may_go_on.wait(GONE_S)
        found.append(tree := of(*arguments))
        return tree

    monkeypatch.setattr(workspace_module.OriginalTree, "of", slow)
    opening = asyncio.create_task(workspaces.open(repository / "data").__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    closing = asyncio.create_task(workspaces.close())
    await asyncio.sleep(0)
    may_go_on.set()
    await closing
    assert not found[0].path.exists()


@in_a_loop
async def test_a_tree_that_could_not_be_read_is_read_again(repository, monkeypatch):
    workspaces = Workspaces()

    def failing(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(workspace_module.OriginalTree, "of", failing)
    with pytest.raises(MemoryError):
        await workspaces.open(repository).__aenter__()
    monkeypatch.undo()
    async with workspaces.open(repository) as ws:
        assert (await ws.run("ls tool.sh")).is_success
    await workspaces.close()


def test_a_lost_fence_is_the_machines_failure_and_not_the_policys(room, ws):
    room.run(ws, "echo 1")
    ws.worker.process.kill()
    with pytest.raises(InfrastructureError, match="what was changed in it is lost"):
        room.run(ws, "sleep 60")
    with pytest.raises(InfrastructureError):
        room.run(ws, "echo 1")


def test_the_loop_runs_on_while_the_memory_of_a_closed_workspace_is_freed(repository, monkeypatch):
    room, may_end, ended = Room(repository), threading.Event(), []
    kept, slow = room.open(), room.open()
    remove = slow.worker.remove

    def removed() -> None:
        assert may_end.wait(GONE_S)
        remove()
        ended.append(slow.worker.process.returncode)

    monkeypatch.setattr(slow.worker, "remove", removed)

    async def closed() -> None:
        leaving = asyncio.create_task(slow.__aexit__())
        assert (await kept.run("echo 1")).stdout == "1\n"
        assert not leaving.done()
        leaving.cancel()
        closing = asyncio.create_task(room.workspaces.close())
        while kept.worker.process.returncode is None:
            await asyncio.sleep(0.01)
        assert not closing.done()
        may_end.set()
        await closing
        assert len(ended) == 1

    room.do(closed())
    room.close()


@in_a_loop
async def test_closing_waits_no_longer_than_its_deadline(repository, monkeypatch, caplog):
    monkeypatch.setattr(workspace_worker, "CLOSE_S", 0.05)
    workspaces, may_end = Workspaces(), threading.Event()
    async with workspaces.open(repository) as ws:
        remove = ws.worker.remove
        monkeypatch.setattr(ws.worker, "remove", lambda: may_end.wait(GONE_S) and remove())
    await workspaces.close()
    assert f"process {ws.worker.process.pid} of its fence is not gone after 0.05 s" in caplog.text
    may_end.set()


def test_a_workspace_that_is_lost_with_its_memory_is_its_commands_failure(room, ws, monkeypatch):
    def killed(meter: object) -> bool:
        os.kill(ws.worker.keeper, signal.SIGKILL)
        return True

    monkeypatch.setattr(UsageMeter, "was_killed", killed)
    assert room.run(ws, "sleep 60").reason == "memory"
    with pytest.raises(WorkspaceError, match="a command used up its 2,147,483,648 bytes of memory"):
        room.run(ws, "echo 1")


def test_a_copy_is_made_in_the_control_group_that_counts_it(tmp_path):
    (tmp_path / "big").write_bytes(bytes(40 * MIB))
    room = Room(tmp_path)
    room.workspaces.first_kind = "copy"
    group = room.open().worker.cgroup
    if group is not None:
        file = "memory.current" if group.version == 2 else "memory.usage_in_bytes"
        assert int((group.directories[0] / file).read_text()) > 40 * MIB
    with pytest.raises(SandboxUnavailable, match="No space left"):
        room.open(limits=replace(LIMITS, tmp_bytes=20 * MIB))
    room.close()


def test_many_trees_leave_few_on_disk_and_no_fences_that_stand_by(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace_module, "KEPT_TREES", 2)
    room, found = Room(tmp_path), []
    for number in range(5):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "file").write_text(f"{number}")
        room.source = tmp_path / f"{number}"
        ws = room.open()
        found.append(ws)
        assert room.run(ws, "cat file").stdout == f"{number}"
    trees = [ws.worker.view.tree for ws in found]
    assert all(tree.exists() for tree in trees)
    fork = room.do(found[0].fork())
    room.do(room.stack.aclose())
    found.clear()
    del ws
    (tmp_path / "5").mkdir()
    room.source = tmp_path / "5"
    room.open()
    assert [tree.exists() for tree in trees] == [True, False, False, False, True]
    assert room.run(fork, "cat file").stdout == "0"
    fork.close()
    room.close()
    assert not any(tree.exists() for tree in trees)


def test_the_default_limits_are_those_of_the_module():
    assert workspace_module.LIMITS.tmp_bytes < workspace_module.LIMITS.memory_bytes


def test_what_holds_here_is_said_before_a_run():
    said = checked_here([replace(LIMITS, wall_s=100), Limits()])
    assert said.startswith("tried from inside, and no hole found; workspaces by overlayfs; ")
