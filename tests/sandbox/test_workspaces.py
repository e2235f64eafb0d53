"""Attacks from inside a workspace: its profile allows more than the sandbox's, and nothing of this works either."""

# ruff: noqa: E501 - an attack on one line is read as one

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workers.sandbox import cgroup, fence
from penstock.workers.sandbox.cgroup import descendants
from penstock.workers.sandbox.execution import MIB, Limits
from penstock.workers.sandbox.workspace import Workspace
from tests.processes import GONE_S, seen, wait_until_gone
from tests.sandbox.test_reaching_out import CALLS, COLUMN, PATHS, PRELUDE
from tests.sandbox.test_using_up import GREEDY
from tests.workers.sandbox.conftest import Room

pytestmark = pytest.mark.real

LIMITS = Limits(
    cpu_s=1, wall_s=60, memory_bytes=256 * MIB, num_processes=16, file_bytes=8 * MIB, tmp_bytes=16 * MIB, tmp_files=256,
)  # fmt: skip
ATTACK_S = 1.5
ALLOWED = {"memfd_create"}
"""Calls that the sandbox refuses and workspaces allow."""
OWN = {"/proc", "/proc/1/environ", "/proc/self/mem", "/proc/self/root/etc/passwd", "/etc/passwd", "/dev/fd/0"}
"""Paths that a workspace has, with content of its own."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    (tree / "mine").write_text("kept\n")
    return tree


@pytest.fixture(scope="module", params=["memory", "disk"])
def room(tree: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """Where changes are in memory, and on a disk."""
    disk = None if request.param == "memory" else tmp_path_factory.mktemp("disk")
    room = Room(tree, limits=LIMITS, disk=disk)
    yield room
    room.close()
    assert disk is None or not list(disk.glob("*/*"))


@pytest.fixture(scope="module")
def attacked(room: Room) -> Workspace:
    """One workspace for all attacks: what one of them breaks, a later test finds broken."""
    return room.open()


def python(room: Room, workspace: Workspace, source: str, timeout_s: float = 60.0):
    room.do(workspace.write("/tmp/attack.py", source))
    outcome = room.run(workspace, "python3 -B /tmp/attack.py", timeout_s)
    assert "SyntaxError" not in outcome.stderr, outcome
    return outcome


@pytest.mark.parametrize("name", GREEDY)
def test_taking_all_ends_and_the_workspace_stays(room, attacked, name):
    source = GREEDY[name].replace("os.write(4,", "os.write(1,")
    outcome = python(room, attacked, source, ATTACK_S)
    if name not in ("a megabyte and one", "files", "nesting", "big number"):
        assert not outcome.is_success
    assert room.run(attacked, "cat mine; rm -f /tmp/*; ls /proc | grep -c '^[0-9]'").stdout.startswith("kept\n")
    assert descendants(attacked.worker.keeper) == []


HUNGRY = """
import os
for path in ("/proc/self/oom_score_adj", "/proc/1/oom_score_adj"):
    try: open(path, "w").write("0")
    except OSError as error: print(error.strerror, flush=True)
files = [os.memfd_create(str(number)) for number in range(4)]
for file in files:
    if os.fork() == 0: break
while True: os.write(file, bytes(1 << 20))
"""


def test_where_memory_runs_out_the_keeper_of_the_tree_is_ended_last(room, attacked):
    """Small processes with much memory that is none's own: the keeper would be the largest, and they the last to go."""
    for _ in range(3):
        outcome = python(room, attacked, HUNGRY)
        assert outcome.stdout in ("", "Read-only file system\n" * 2), outcome
        assert not outcome.is_success
        assert room.run(attacked, "cat mine").stdout == "kept\n"


def test_calls_with_which_kernels_were_broken_are_refused(room, attacked):
    calls = {name: call for name, call in CALLS.items() if name not in ALLOWED}
    lines = [PRELUDE, "found = {}"]
    for name, (numbers, *arguments) in calls.items():
        words = ", ".join(map(str, [numbers[COLUMN], *arguments]))
        lines += [
            f"try: found[{name!r}] = call({words}) and 0",
            f"except OSError as error: found[{name!r}] = error.errno",
        ]
    outcome = python(room, attacked, "\n".join([*lines, "import json; print(json.dumps(found))"]))
    expected = {name: {"clone3": 38}.get(name, 1) for name in calls}
    assert json.loads(outcome.stdout) == expected


def test_files_of_the_host_are_not_there(room, attacked):
    paths = [
        path for path in PATHS.split() if path not in OWN and not os.path.realpath(sys.base_prefix).startswith(path)
    ]
    found = room.run(attacked, f"for p in {' '.join(paths)}; do [ -e $p ] && echo $p; done; ls /changes").stdout
    assert found == ""
    for place in ("/tmp", "/dev/shm", "/var/tmp"):
        with tempfile.NamedTemporaryFile(dir=place, prefix="penstock-canary-") as canary:
            os.chmod(canary.name, 0o666)
            for path in (canary.name, f"/proc/1/root{canary.name}", f"/usr/../../..{canary.name}"):
                assert room.run(attacked, f"cat {path}").exit_code != 0


def test_no_connection_leads_out_or_to_another_workspace(room, attacked):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"penstock-attack-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        port = tcp.getsockname()[1]
        for target in (
            f"socket.create_connection(('127.0.0.1', {port}), 1)",
            f"socket.socket(socket.AF_UNIX).connect('\\0{name}')",
        ):
            assert "refused" in python(room, attacked, f"import socket\n{target}").stderr
    assert (
        "unreachable" in python(room, attacked, "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)").stderr
    )
    other = room.open()
    serving = room.loop.create_task(
        other.run("python3 -c \"import socket, time; s = socket.create_server(('127.0.0.1', 7777)); time.sleep(5)\"", 5)
    )
    assert "refused" in python(room, attacked, "import socket\nsocket.create_connection(('127.0.0.1', 7777), 1)").stderr
    serving.cancel()
    room.do(_ended(serving))
    other.close()


def test_who_reaches_one_address_reaches_no_other(room, attacked):
    with (
        socket.create_server(("127.0.0.1", 0)) as given,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_server(("0.0.0.0", 0)) as everywhere,
    ):
        port = given.getsockname()[1]
        own = [
            ("127.0.0.1", other.getsockname()[1]),
            ("127.0.0.1", everywhere.getsockname()[1]),
            ("::1", port),
            ("127.0.0.2", port),
        ]
        targets = [*own, ("192.0.2.1", port), (socket.gethostbyname(socket.gethostname()), everywhere.getsockname()[1])]
        source = f"""
import errno, socket
socket.create_connection(("127.0.0.1", {port}), 1).close()
for target in {targets}:
    try:
        socket.create_connection(target, 1)
        print("reached", target)
    except OSError:
        pass
try:
    socket.create_server(("127.0.0.1", {port}), reuse_port=True)
    print("took its place")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
        room.do(attacked.write("/tmp/attack.py", source))
        outcome = room.do(attacked.run("python3 -B /tmp/attack.py", reach=f"http://127.0.0.1:{port}/v1"))
        assert (outcome.stdout, outcome.stderr) == ("EADDRINUSE\n", "")


async def _ended(task) -> None:
    try:
        await task
    except BaseException:  # noqa: BLE001 - however it ends
        return


def test_what_tests_of_repositories_need_works(room, attacked):
    source = """
import fcntl, os, socket, subprocess, threading
server = socket.create_server(("localhost", 0))
threading.Thread(target=lambda: server.accept()[0].sendall(b"served"), daemon=True).start()
assert socket.create_connection(server.getsockname()).recv(9) == b"served"
with open("lock", "w") as file: fcntl.flock(file, fcntl.LOCK_EX)
os.chown("lock", os.getuid(), os.getgid())
with open("/tmp/program", "w") as file: file.write("#!/bin/sh\\necho ran\\n")
os.chmod("/tmp/program", 0o755)
assert subprocess.run("/tmp/program", capture_output=True, text=True).stdout == "ran\\n"
assert int(open("/proc/self/status").read().split("Pid:")[1].split()[0]) == os.getpid()
import getpass, pathlib
assert str(pathlib.Path.home()) == "/tmp" and getpass.getuser() == "agent"
"""
    outcome = python(room, attacked, source)
    assert outcome.is_success, outcome


def test_nothing_of_the_keeper_is_seen_or_hit(room, attacked):
    assert room.run(attacked, "ls /proc | grep '^[0-9]' | head -1; kill -9 -1; kill -9 2").stdout == "1\n"
    assert "Killed" not in room.run(attacked, "echo lives").stderr
    source = """
import os
for place in ("/proc/1/fd", "/proc/self/fd"):
    for name in os.listdir(place):
        try: target = os.readlink(f"{place}/{name}")
        except OSError: continue
        assert "upper" not in target and "changes" not in target, target
assert len(os.environ) < 12, os.environ
assert all(line.split()[1] == "0000000000000000" for line in open("/proc/self/status") if line.startswith("Cap") and not line.startswith("CapBnd"))
"""
    outcome = python(room, attacked, source)
    assert outcome.is_success, outcome
    assert room.run(attacked, "mount -t tmpfs none /mnt; umount /proc; unshare -U true; chroot / true").exit_code != 0


def test_the_original_and_programs_cannot_be_written(room, attacked, tree):
    for path in ("/original/mine", "/usr/bin/x", "/etc/passwd", "/x", "/dev/x", os.__file__):
        assert room.run(attacked, f"echo x > {path}").exit_code != 0
    room.run(
        attacked, "chmod 777 /original; rm -rf /original/*; mv /original /o; ln /original/mine linked; echo x >> linked"
    )
    assert (tree / "mine").read_text() == "kept\n"
    other = room.open()
    assert room.run(other, "cat mine").stdout == "kept\n"
    other.close()


TANGLED = {
    "links that lead out": "ln -s /etc/passwd a; ln -s / root; ln -s . loop; ln -s /proc/self/mem mem",
    "names that are no text": "printf x > \"$(printf 'a\\377\\nb')\"; touch -- '-rf' '*' 'a\nb'; mkdir $'\\x01'",
    "devices and pipes": "mkfifo pipe; python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('s')\"",
    "what nobody may read": "mkdir shut; echo x > shut/x; echo y > y; chmod 000 y shut",
    "files for directories": "rm -rf d; mkdir d; echo x > d/x; rm -rf mine; mkdir mine; echo x > mine/x",
    "deep": "i=0; while [ $i -lt 200 ]; do mkdir -p d; cd d || break; i=$((i+1)); done; echo x > x",
}


@pytest.mark.parametrize("name", TANGLED)
def test_a_tangled_tree_is_forked_as_it_is_and_reaches_nothing(room, tree, name):
    workspace = room.open()
    room.run(workspace, f"bash -c {json.dumps(TANGLED[name]) if 'bash' in name else repr(TANGLED[name])}")
    fork = room.do(workspace.fork())
    listed = "chmod -R u+rwX . 2>/dev/null; find . ! -type p ! -type s -printf '%p %y %l\\n' | sort | md5sum"
    assert room.run(fork, listed).stdout == room.run(workspace, listed).stdout
    room.do(fork.diff())
    assert (tree / "mine").read_text() == "kept\n"
    fork.close()
    workspace.close()


ORDINARY_USER = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from penstock.workers.sandbox.workspace import Workspaces
async def main():
    workspaces = Workspaces()
    async with workspaces.open({tree!r}, disk={disk!r}) as ws:
        await ws.run("echo more >> mine; id -u > user; mkdir shut; echo x > shut/x; chmod 0 shut")
        async with await ws.fork() as fork:
            print(os.getuid(), ws.kind, (await fork.run("cat mine user")).stdout)
        print((await ws.check("cat mine hidden", files={{"hidden": "h"}})).stdout)
    await workspaces.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_an_ordinary_user_has_the_same_workspaces(is_on_disk):
    root = str(Path(__file__).parents[2])
    become = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"] if os.geteuid() == 0 else []
    bwrap = str(fence.find_bwrap().parent)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        tree = Path(directory) / "tree"
        tree.mkdir()
        (tree / "mine").write_text("kept\n")
        (disk := Path(directory) / "disk").mkdir()
        for path, mode in ((Path(directory), 0o755), (tree, 0o755), (disk, 0o777)):
            path.chmod(mode)
        for python in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
            words = [*become, "env", "-i", f"PATH={bwrap}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1", python]
            asked = subprocess.run(
                [*words, "-c", f"import sys; sys.version_info >= (3, 11) or 1 / 0; open({__file__!r})"]
            )
            if asked.returncode == 0:
                break
        else:
            pytest.skip(
                "NO INTERPRETER that another user may run, with this folder: workspaces of ordinary users are untested"
            )
        program = ORDINARY_USER.format(root=root, tree=str(tree), disk=str(disk) if is_on_disk else None)
        done = subprocess.run([*words, "-c", program], capture_output=True, text=True, timeout=900, cwd="/")
        assert len(list(disk.glob("*"))) == is_on_disk
        assert not list(disk.glob("*/*"))
    uid = "12345" if become else str(os.getuid())
    assert done.stdout.split() == [uid, "overlay", "kept", "more", "65533", "kept", "more", "h"], done.stderr[-2000:]


DRIVER = """
import asyncio, sys
from penstock.workers.sandbox.workspace import Workspaces
async def main():
    workspaces = Workspaces()
    async with workspaces.open(sys.argv[1]) as ws, await ws.fork() as fork:
        fork.worker.rest()
        await asyncio.sleep(0.3)
        print(ws.worker.process.pid, fork.worker.process.pid, flush=True)
        await ws.run("sleep 600 & setsid sleep 600 & sleep 600")
asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_user_of_workspaces_is_killed_nothing_is_left(tree, number):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tree)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert driver.stdout is not None
    with driver.stdout:
        fences = list(map(int, driver.stdout.readline().split()))
    processes = seen([*fences, *(pid for one in fences for pid in descendants(one))])
    assert len(processes) >= 4
    driver.send_signal(number)
    driver.wait(GONE_S)
    wait_until_gone(processes)


def test_without_a_cgroup_a_watch_ends_what_takes_too_much(tree, monkeypatch):
    monkeypatch.setattr(cgroup, "own_group", lambda controller: None)
    room = Room(tree, limits=LIMITS)
    workspace = room.open()
    assert "no control group" in workspace.worker.enforced
    room.run(workspace, "echo 1 > made")
    assert python(room, workspace, GREEDY["memory of children"]).reason == "memory"
    assert "not permitted" in python(room, workspace, "import os\nos.memfd_create('x')").stderr
    assert room.run(workspace, "for i in 1 2 3 4; do (while :; do :; done) & done; wait").reason == "timeout_cpu"
    assert room.run(workspace, "cat made mine").stdout == "1\nkept\n"
    room.close()


COVERED = """
import asyncio, sys
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.sandbox.workspace import Workspaces
async def main():
    async with Sandbox() as sandbox:
        print((await sandbox.run_python("print(7)")).stdout.strip())
    try:
        async with Workspaces().open(sys.argv[1]): print("opened")
    except Exception as error: print(type(error).__name__, error)
asyncio.run(main())
"""


@pytest.mark.machines
def test_where_proc_is_covered_in_parts_the_error_says_what_to_do(tree):
    """As Docker does it; the sandbox works there."""
    inner = f"mount --bind /dev/null /proc/version && exec {sys.executable} -c '{COVERED}' {tree}"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inner]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.stdout.startswith("7\nSandboxUnavailable sandbox: a workspace has a /proc of its own"), done
    assert "systempaths=unconfined" in done.stdout
