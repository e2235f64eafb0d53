"""What the processes of an execution use together is held, with a cgroup and without, and is nobody else's."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.workers.sandbox import cgroup
from penstock.workers.sandbox import cgroup as cgroup_module
from penstock.workers.sandbox.execution import MIB, Ending, Limits, Value
from penstock.workers.sandbox.fence import FencePrograms
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.sandbox.sandbox_worker import FenceWorker
from tests.sandbox.conftest import HUNGRY, in_a_loop

pytestmark = pytest.mark.real

LIMITS = Limits(cpu_s=1, wall_s=60, memory_bytes=256 * MIB, num_processes=16, tmp_bytes=8 * MIB, tmp_files=64)
BUFFERS = """
import os, socket, time
for _ in range(8):
    if os.fork() == 0: break
kept = []
try:
    while True:
        kept += socket.socketpair()
        for end in kept[-2:]:
            end.setblocking(False)
            try:
                while True: end.send(bytes(32768))
            except BlockingIOError: pass
except OSError: pass
time.sleep(60)
"""
UNREAPED = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        while True: pass
time.sleep(60)
"""
WAITED_FOR = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        started = time.process_time()
        while time.process_time() - started < 0.15: pass
        os._exit(0)
    os.wait()
"""
WAITS_FOR_A_BYTE = """
import os, time
def solve(x):
    open("/tmp/held", "w").close()
    while not os.path.getsize("/tmp/held"): time.sleep(0.01)
    return x
"""


@pytest.fixture
def without_cgroup(monkeypatch):
    monkeypatch.setattr(cgroup, "own_group", lambda controller: None)


@in_a_loop
async def test_without_a_cgroup_the_watch_bounds_memory(without_cgroup):
    async with Sandbox(LIMITS) as sandbox:
        assert [one.cgroup for one in sandbox.alive] == [None]
        assert "no control group" in sandbox.enforced
        assert (await sandbox.run_python(HUNGRY)).reason == "memory"
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"


@in_a_loop
async def test_without_a_cgroup_unreadable_processes_count_whole(without_cgroup, monkeypatch):
    """This happens to root without `CAP_SYS_PTRACE`, and with code that has become a program that nobody may read."""
    read_text = Path.read_text

    def refused(path, *arguments, **more):
        if path.name == "smaps_rollup":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *arguments, **more)

    monkeypatch.setattr(cgroup_module.Path, "read_text", refused)
    async with Sandbox(LIMITS) as sandbox:
        assert (await sandbox.run_python(HUNGRY)).reason == "memory"
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"


@pytest.mark.parametrize("has_cgroup", [True, False])
@in_a_loop
async def test_buffers_of_sockets_are_memory(has_cgroup, monkeypatch):
    if not has_cgroup:
        monkeypatch.setattr(cgroup, "own_group", lambda controller: None)
    async with Sandbox(LIMITS) as sandbox:
        assert (await sandbox.run_python(BUFFERS)).reason == "memory"
        assert (await sandbox.run_python("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint(1)")).stdout == "1\n"


BUFFER = """
import socket
def solve():
    end, _ = socket.socketpair()
    try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    except PermissionError: pass
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
"""


@in_a_loop
async def test_without_a_cgroup_a_socket_inside_has_the_buffer_that_is_counted(without_cgroup):
    """The socket has no larger buffer: the machine's limit (net.core.wmem_max) may be a hundred MiB."""
    async with Sandbox(LIMITS) as sandbox:
        assert await sandbox.call(BUFFER, "solve", [[]]) == [Value(cgroup_module.buffer_bytes())]


@in_a_loop
async def test_without_a_cgroup_no_memory_is_given_that_the_watch_does_not_see(without_cgroup):
    """A process writes to shared memory and ends; another holds it, and has no page of it."""
    shared = "import mmap\ndef solve(): return len(mmap.mmap(-1, 4096))"
    zero = "import mmap, os\ndef solve(): return len(mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096, mmap.MAP_SHARED))"
    private = "import mmap\ndef solve(): return len(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))"
    async with Sandbox(LIMITS) as sandbox:
        for source in (shared, zero):
            (result,) = await sandbox.call(source, "solve", [[]])
            assert "PermissionError" in getattr(result, "text", ""), result
        assert await sandbox.call(private, "solve", [[]]) == [Value(4096)]


@pytest.mark.parametrize("has_cgroup", [True, False])
@in_a_loop
async def test_the_time_of_children_that_nobody_waits_for_is_counted(has_cgroup, monkeypatch):
    if not has_cgroup:
        monkeypatch.setattr(cgroup, "own_group", lambda controller: None)
    async with Sandbox(LIMITS) as sandbox:
        outcome = await sandbox.run_python(UNREAPED)
        assert outcome.reason == "timeout_cpu", outcome
        assert outcome.cpu_s > 1
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"


@pytest.mark.parametrize("has_cgroup", [True, False])
@in_a_loop
async def test_the_time_of_children_that_were_waited_for_is_counted_once(has_cgroup, monkeypatch):
    if not has_cgroup:
        monkeypatch.setattr(cgroup, "own_group", lambda controller: None)
    async with Sandbox(LIMITS) as sandbox:
        outcome = await sandbox.run_python(WAITED_FOR)
        assert outcome.reason == "exited", outcome
        assert 0.6 <= outcome.cpu_s < 1.0


class Told(FenceWorker):
    """A fence whose first execution is said to have run out of memory, wherever the memory was."""

    ran: int

    async def execute(self, request, stdin, wall_s=None) -> Ending:
        Told.ran += 1
        ending = await super().execute(request, stdin, wall_s)
        if Told.ran != 2:
            return ending
        self.close()
        return replace(ending, status=9, out_of_memory=True, answer=b"")


@in_a_loop
async def test_out_of_memory_is_run_again_behind_a_new_fence(monkeypatch):
    """The first, which is innocent, was charged for what one before it had left."""
    Told.ran = 0
    monkeypatch.setattr("penstock.workers.sandbox.sandbox.FenceWorker", Told)
    monkeypatch.setattr("penstock.workers.sandbox.sandbox.check", passes)
    async with Sandbox(LIMITS, num_workers=2) as sandbox:
        await sandbox.run_python("print(1)")
        (first,) = sandbox.alive
        assert (await sandbox.run_python("print(2)")).stdout == "2\n"
        assert Told.ran == 3
        assert first not in sandbox.alive
        assert [one.num_executions for one in sandbox.alive] == [1]


async def passes(worker: FenceWorker, machine: FencePrograms) -> None:
    """No program has run behind this fence."""


@in_a_loop
async def test_out_of_memory_behind_a_new_fence_is_not_run_again(monkeypatch):
    """Processes that the kernel has left are not waited for."""
    monkeypatch.setattr("penstock.workers.sandbox.sandbox.check", passes)
    async with Sandbox(LIMITS) as sandbox:
        (first,) = sandbox.alive
        outcome = await sandbox.run_python(HUNGRY)
        assert (outcome.reason, outcome.exit_code) == ("memory", -9), "it would have gone on for half a minute"
        assert not sandbox.alive, "its fence is not used again"
        assert first.num_executions == 1


@in_a_loop
async def test_a_tmp_that_stays_busy_after_the_end_costs_the_fence_not_the_result():
    """What is held here by this process was held by descriptors under way between sockets, while code could send
    these: /tmp could not be unmounted, and the code was run a second time."""
    async with Sandbox(LIMITS) as sandbox:
        (first,) = sandbox.alive
        running = asyncio.create_task(sandbox.call(WAITS_FOR_A_BYTE, "solve", [[7]]))
        while not os.path.exists(held := f"/proc/{first.keeper}/root/tmp/held"):
            await asyncio.sleep(0.01)
            assert not running.done(), running
        with open(held, "r+b", buffering=0) as file:
            file.write(b"x")
            assert await running == [Value(7)]
        assert not first.is_open
        assert not sandbox.alive
        assert await sandbox.call("def f(): return 1", "f", [[]]) == [Value(1)]


def test_the_watch_counts_rising_times_and_forgets_lost_processes(monkeypatch):
    """1 and 2 run; 2 ends unseen; 1 goes on; 1 waits for a 3 that has been seen."""
    looks = [{1: (0.5, 0), 2: (1.0, 0)}, {1: (0.75, 0)}, {1: (1.0, 0), 3: (2.0, 0)}, {1: (1.25, 2.25)}]
    now: dict[int, tuple[float, float]] = {}
    monkeypatch.setattr(cgroup_module, "descendants", lambda pid: list(now))
    monkeypatch.setattr(cgroup_module, "times_of", lambda pid: ((pid, 0), now[pid]))
    monkeypatch.setattr(cgroup_module, "memory_of", lambda pid: 10)
    monkeypatch.setattr(cgroup_module, "num_sockets", lambda pid: 3)
    monkeypatch.setattr(cgroup_module, "buffer_bytes", lambda: 100)
    watch = cgroup_module.UsageWatch(0)
    seen = []
    for look in looks:
        now.clear()
        now.update(look)
        assert watch.look() == 10 * len(look) + 3 * cgroup_module.BUFFERS_HELD * 100
        seen.append(watch.cpu_s)
    assert seen == [1.5, 1.75, 4.0, 4.25]


def test_memory_counts_where_the_first_thread_of_a_process_has_ended():
    program = (
        "import ctypes, threading, time\n"
        "def fill():\n"
        "    kept = bytearray(b'x') * (64 << 20); print(flush=True); time.sleep(600)\n"
        "threading.Thread(target=fill).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        while "Z" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            time.sleep(0.005)
        assert 64 * MIB < cgroup_module.memory_of(process.pid) < 128 * MIB
        process.kill()
    assert cgroup_module.memory_of(process.pid) == 0
