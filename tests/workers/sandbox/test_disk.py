"""Workspaces whose changes are on a named disk: what they do, what bounds them, and that nothing of them stays."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError, InfrastructureError, WorkspaceError
from penstock.workers.sandbox import disk as disk_module
from penstock.workers.sandbox import sandbox_worker
from penstock.workers.sandbox.cgroup import descendants
from penstock.workers.sandbox.disk import DiskChanges, base_on, prepare
from penstock.workers.sandbox.execution import MIB, Limits
from penstock.workers.sandbox.sandbox_worker import WORKSPACE_KEEPER
from penstock.workers.sandbox.workspace import Workspaces
from tests.processes import GONE_S, seen, wait_until_gone
from tests.sandbox.conftest import in_a_loop
from tests.workers.sandbox.conftest import Room
from tests.workers.sandbox.test_workspace import CHANGES, memory_files, tree_of

pytestmark = pytest.mark.real

SMALL = Limits(
    cpu_s=60, wall_s=60, memory_bytes=512 * MIB, num_processes=64, file_bytes=4096 * MIB, tmp_bytes=32 * MIB,
    tmp_files=300,
)  # fmt: skip
GROWING = "import os\n{}\nwhile True: file.write(bytes(1 << 20))"
WAYS = {
    "a file": "file = open('big', 'wb')",
    "a file of /tmp": "file = open('/tmp/big', 'wb')",
    "what is removed": "file = open('big', 'wb'); os.unlink('big')",
    "what has no name": "import tempfile; file = tempfile.TemporaryFile()",
    "below what nobody may enter": "os.mkdir('d'); file = open('d/big', 'wb'); os.chmod('d', 0)",
    "of a process that hides": (
        "file = open('/tmp/big', 'wb'); os.unlink('/tmp/big')\n"
        "open('/tmp/hidden', 'w').write('#!/bin/sh\\n'); import shutil; shutil.copy('/bin/dd', '/tmp/hidden')\n"
        "os.chmod('/tmp/hidden', 0o111); os.dup2(file.fileno(), 1)\n"
        "os.execv('/tmp/hidden', ['dd', 'if=/dev/urandom', 'bs=1M'])"
    ),
}
"""Ways to take more and more of a disk."""


def left_on(disk: Path) -> list[str]:
    return sorted(os.listdir(base_on(disk)))


@pytest.fixture
def room(repository: Path, tmp_path: Path):
    room = Room(repository, disk=tmp_path, limits=SMALL)
    yield room
    room.close()
    assert left_on(tmp_path) == []


@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_a_workspace_on_a_disk_does_what_one_in_memory_does(repository, tmp_path, kind):
    rooms = [Room(repository, disk=tmp_path), Room(repository)]
    seen_there = []
    for room in rooms:
        room.workspaces.first_kind = kind
        ws = room.open()
        assert ws.kind in (kind, "reflink")
        room.run(ws, CHANGES + "echo kept > /tmp/kept")
        room.do(ws.shell().run("cd package; export A=1"))
        fork, snapshot = room.do(ws.fork()), room.do(ws.snapshot())
        assert room.do(fork.shell().run("pwd; echo $A; cat /tmp/kept")).stdout == "/workspace/package\n1\nkept\n"
        assert tree_of(room, fork) == tree_of(room, ws)
        room.run(ws, "rm -rf * /tmp/*; echo x > y")
        room.do(ws.restore(snapshot))
        assert tree_of(room, fork) == tree_of(room, ws)
        checked = room.do(fork.check("cat data/one hidden; ls /tmp", files={"hidden": "h\n"}))
        seen_there.append((tree_of(room, ws), room.do(ws.diff()), checked.stdout, snapshot.num_bytes > 100))
        fork.close()
        room.close()
    assert seen_there[0] == seen_there[1]
    assert left_on(tmp_path) == []


def test_changes_are_on_the_disk_and_leave_it_with_their_workspace(room, tmp_path, repository):
    before = (repository / "package" / "sums.py").read_bytes()
    ws = room.open()
    room.run(ws, "echo mark > made; echo more >> package/sums.py; mkdir shut; echo x > shut/x; chmod 0 shut")
    assert [path.read_text() for path in tmp_path.rglob("made")] == ["mark\n"]
    directory = ws.worker.view.changes.path
    room.do(ws.__aexit__())
    assert not directory.exists()
    assert (repository / "package" / "sums.py").read_bytes() == before


@pytest.mark.parametrize("way", WAYS)
def test_who_takes_too_much_of_a_disk_is_ended_and_the_tree_stays(room, way):
    ws = room.open()
    room.run(ws, "echo 1 > mine")
    room.do(ws.write("/tmp/grow.py", GROWING.format(WAYS[way])))
    outcome = room.run(ws, "python3 /tmp/grow.py")
    assert (outcome.reason, outcome.is_success) == ("disk", False), outcome
    assert descendants(ws.worker.keeper) == []
    assert room.run(ws, "cat mine").stdout == "1\n"
    ws.worker.rest()
    assert room.run(ws, "chmod -R u+rwX .; rm -rf big d /tmp/big && sleep 0.2 && echo gone").stdout == "gone\n"
    assert room.run(ws, "head -c 1000000 /dev/urandom > some; sleep 0.2").is_success


def test_the_number_of_files_on_a_disk_is_bounded(room):
    ws = room.open()
    assert room.run(ws, "i=0; while :; do i=$((i+1)); : > f$i; done").reason == "disk"
    assert room.run(ws, "rm f*; sleep 0.2; ls | wc -l").is_success
    linked = "echo x > x; i=0; while [ $i -lt 250 ]; do i=$((i+1)); ln x l$i; done; head -c 20000000 /dev/urandom > x"
    assert room.run(ws, linked + "; sleep 0.2").is_success, "files with many names are counted once"


def test_processes_that_come_and_go_are_not_mistaken_for_such_that_hide(room):
    ws = room.open()
    for _ in range(3):
        busy = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); /bin/true & /bin/true; done; wait"
        outcome = room.run(ws, busy)
        assert outcome.is_success, outcome


def test_a_request_about_the_tree_is_bounded_too(room):
    ws = room.open()
    with pytest.raises(WorkspaceError, match=r"write big: ended by a limit \(disk\)"):
        room.do(ws.write("big", bytes(40 * MIB)))
    with pytest.raises(WorkspaceError, match="disk"):
        room.do(ws.fork())
    room.run(ws, "rm big; echo 1 > mine")
    outcome = room.do(ws.check("true", files={"hidden": bytes(40 * MIB)}))
    assert outcome.reason == "changes"


def test_a_tree_that_is_too_deep_to_count_is_given_up_and_removed(room):
    ws = room.open()
    deep = "import os\nfor _ in range(250): os.mkdir('d' * 40); os.chdir('d' * 40)"
    assert room.do(ws.run("python3 -", stdin=deep)).reason == "disk"
    with pytest.raises(WorkspaceError, match="far more of its disk than they may"):
        room.run(ws, "true")


@pytest.fixture
def keeper_with(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """Start later fences with a keeper of which one line is another."""

    def change(old: str, new: str) -> None:
        text = WORKSPACE_KEEPER.read_text()
        assert old in text
        path = tmp_path_factory.mktemp("keeper") / "keeper.py"
        path.write_text(text.replace(old, new))
        monkeypatch.setattr(sandbox_worker, "WORKSPACE_KEEPER", path)

    return change


def test_command_after_command_does_not_fill_a_disk(room, keeper_with):
    keeper_with("MOST_AT_ONCE = (2 << 30, 100_000)", "MOST_AT_ONCE = (0, 0)")
    ws, ended = room.open(), 0
    with suppress(WorkspaceError):
        while ended < 50:
            assert room.run(ws, "mkdir $$; cd $$; i=0; while :; do i=$((i+1)); : > f$i; done").reason == "disk"
            ended += 1
            assert sum(len(names) for _, _, names in os.walk(ws.worker.view.changes.path)) < 50_000
    assert 1 <= ended < 50


def test_a_nearly_full_disk_ends_commands_before_it_is_full(room, keeper_with):
    room.open()
    keeper_with("LEAST_FREE_BYTES = 256 << 20", "LEAST_FREE_BYTES = 1 << 62")
    room.open()
    ws = room.open()  # the others' fences stood before
    assert room.run(ws, "sleep 60").reason == "disk"


def test_a_cancelled_command_ends_and_its_changes_stay(room):
    ws = room.open()

    async def cancelled() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.4):
                await ws.run("echo 1 > started; sleep 600")

    room.do(cancelled())
    assert room.run(ws, "cat started; echo 2").stdout == "1\n2\n"
    assert room.run(ws, "sleep 60", timeout_s=0.2).reason == "timeout_wall"


def test_commands_reach_neither_their_directory_nor_another_ones(room, tmp_path):
    ws, other = room.open(), room.open()
    room.run(other, "echo secret > secret; chmod 777 . secret")
    names = f"/changes /changes/upper /changes/work {tmp_path} /proc/1/root{tmp_path} /tmp/../changes/tmp"
    assert room.run(ws, f"ls {names}; ls /proc/self/cwd/../changes; cat /changes/upper/secret").stdout == ""
    assert room.run(ws, "umount /changes; mount -t tmpfs x /mnt; echo x > /changes/x; cd /changes").exit_code != 0
    found = room.run(ws, "find / -name secret -not -path '/proc/*' 2>/dev/null; ls -l /proc/*/fd /proc/self/fd").stdout
    assert "secret" not in found
    assert "upper" not in found
    room.do(ws.restore(room.do(ws.snapshot())))
    assert room.run(ws, "ls /changes").stdout == ""


@in_a_loop
async def test_a_disk_that_cannot_be_used_is_named(repository, tmp_path, monkeypatch):
    workspaces = Workspaces()
    (tmp_path / "file").touch()
    for name, said in (("nothing", "No such file or directory"), ("file", "Not a directory"), ("open", "may write to")):
        if name == "open":
            (tmp_path / "open" / base_on(tmp_path).name).mkdir(parents=True)
            (tmp_path / "open" / base_on(tmp_path).name).chmod(0o777)
        with pytest.raises(ConfigError, match=said):
            await workspaces.open(repository, disk=tmp_path / name).__aenter__()
    with pytest.raises(ConfigError, match="lies below show="):
        await workspaces.open(repository, disk=f"{sys.prefix}/x", show=[sys.prefix]).__aenter__()
    monkeypatch.setattr(disk_module, "LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(InfrastructureError, match=r"bytes left.*Make room"):
        await workspaces.open(repository, disk=tmp_path).__aenter__()
    await workspaces.close()


def test_more_than_memory_holds_may_be_changed_on_a_disk(repository, tmp_path):
    room = Room(repository, disk=tmp_path)
    ws = room.open(limits=Limits(memory_bytes=64 * MIB, tmp_bytes=512 * MIB, file_bytes=512 * MIB))
    assert room.run(ws, "head -c 150000000 /dev/urandom > big; ls -s big").is_success
    before = memory_files()
    snapshot = room.do(ws.snapshot())
    assert snapshot.num_bytes > 150_000_000
    assert memory_files() == before
    assert len(left_on(tmp_path)) == 4, "two workspaces with their locks, and a snapshot without a name"
    room.close()


DRIVER = """
import asyncio, sys
from penstock.workers.sandbox.workspace import Workspaces
async def main():
    workspaces = Workspaces()
    async with workspaces.open(sys.argv[1], disk=sys.argv[2]) as ws:
        await ws.run("mkdir -p a/b; echo x > a/b/x; chmod 0 a/b")
        print(ws.worker.process.pid, flush=True)
        await ws.run("sleep 600 & setsid sleep 600 & sleep 600")
asyncio.run(main())
"""


def test_what_a_killed_process_left_is_removed_by_the_next(repository, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(repository), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert driver.stdout is not None
    with driver.stdout:
        fence = int(driver.stdout.readline())
    processes = seen([fence, *descendants(fence)])
    held = DiskChanges(tmp_path, None)
    assert len([name for name in left_on(tmp_path) if name.endswith(".lock")]) >= 2
    driver.send_signal(signal.SIGKILL)
    driver.wait(GONE_S)
    wait_until_gone(processes)
    assert len(left_on(tmp_path)) >= 4
    prepare(tmp_path)
    other = DiskChanges(tmp_path, None)
    assert left_on(tmp_path) == sorted(f"{one.path.name}{end}" for one in (held, other) for end in ("", ".lock"))
    held.remove()
    held.remove()
    other.remove()
    assert left_on(tmp_path) == []


REFLINKS = """
set -e
truncate -s 1G "$1/image"; mkfs.xfs -q "$1/image"; mkdir "$1/mount"; mount -o loop "$1/image" "$1/mount"
head -c 200000000 /dev/urandom > "$1/tree/big"
TMPDIR="$1/mount" "$2" -c "$3" "$1/tree" "$1/mount"
umount "$1/mount"
"""
COPIED = """
import asyncio, os, sys
from penstock.workers.sandbox.workspace import Workspaces
async def main():
    workspaces = Workspaces()
    workspaces.first_kind = "copy"
    async with workspaces.open(sys.argv[1], disk=sys.argv[2]) as ws, await ws.fork() as fork:
        await fork.run("echo more >> file")
        found = os.statvfs(sys.argv[2])
        print(ws.kind, (await ws.run("cat file")).stdout.strip(), (await fork.run("cat file")).stdout.split())
        print((found.f_blocks - found.f_bfree) * found.f_frsize < 300_000_000)
    await workspaces.close()
asyncio.run(main())
"""


@pytest.mark.machines
def test_a_copy_shares_blocks_where_the_file_system_can(tmp_path):
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("NO mkfs.xfs (apt install xfsprogs): copies that share blocks are untested")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("kept\n")
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-c", REFLINKS, "bash"]
    done = subprocess.run([*words, tmp_path, sys.executable, COPIED], capture_output=True, text=True, timeout=900)
    assert done.stdout == "reflink kept ['kept', 'more']\nTrue\n", done
