"""Whoever uses a fence may die in any way: nothing of what ran in it is left."""

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.conf.errors import NotStarted, SandboxUnavailable
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.runtime.processes import ProcessId
from penstock.workers.sandbox.cgroup import descendants
from penstock.workers.sandbox.execution import Limits, Value
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.sandbox.sandbox_worker import FenceWorker
from tests.processes import GONE_S, seen, wait_until_gone
from tests.sandbox.conftest import in_a_loop
from tests.virtual_time import put_forward, run_ahead

pytestmark = pytest.mark.real

LIMITS = Limits(cpu_s=600, wall_s=600)
"""Nothing here ends by itself while a test looks at it."""
DRIVER = """
import asyncio, sys
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox import Sandbox
async def main():
    async with Sandbox(Limits(wall_s=600)) as sandbox:
        (worker,) = sandbox.alive
        print(worker.keeper, worker.process.pid, flush=True)
        await sandbox.run_python("import os, time\\nos.fork() or os.setsid()\\ntime.sleep(600)")
asyncio.run(main())
"""
ASLEEP = "import time\ntime.sleep(600)"
TOLD = """
import os, time
open("/tmp/told", "w").close()
while not os.path.getsize("/tmp/told"): time.sleep(0.01)
print(1)
"""


def signal_keeper(worker: FenceWorker, number: int) -> ProcessId:
    """Send the keeper a signal by its handle, so that no other process is ever meant."""
    keeper = ProcessId.of(worker.keeper)
    signal.pidfd_send_signal(worker.handle, number)
    return keeper


def wait_for_children(pid: int) -> list[int]:
    deadline = time.monotonic() + GONE_S
    while len(found := descendants(pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@in_a_loop
async def test_a_fence_that_is_given_up_before_it_is_ready_leaves_nothing(monkeypatch):
    monkeypatch.setattr("penstock.workers.sandbox.sandbox_worker.START_S", 0.5)
    monkeypatch.setattr("penstock.workers.sandbox.sandbox_worker.KEEPER", Path(__file__).with_name("silent.py"))
    processes: list[ProcessId] = []
    close = FenceWorker.close

    def noted(worker: FenceWorker) -> None:
        processes.extend(seen([worker.process.pid, *descendants(worker.process.pid)]))
        close(worker)

    monkeypatch.setattr(FenceWorker, "close", noted)
    with pytest.raises(SandboxUnavailable):
        await Sandbox().start()
    assert processes
    wait_until_gone(processes)


async def busy_worker(sandbox: Sandbox, other_than: int = 0) -> FenceWorker:
    """The worker that runs something, with another keeper than that one."""
    async with asyncio.timeout(GONE_S):
        while True:
            for worker in sandbox.alive:
                if worker.keeper not in (0, other_than) and descendants(worker.keeper):
                    return worker
            await asyncio.sleep(0.02)


async def tell(worker: FenceWorker) -> None:
    """Let `TOLD` go on."""
    async with asyncio.timeout(GONE_S):
        while not os.path.exists(told := f"/proc/{worker.keeper}/root/tmp/told"):
            await asyncio.sleep(0.02)
    with open(told, "r+b", buffering=0) as file:
        file.write(b"x")


@pytest.mark.parametrize("stopped", [False, True], ids=["", "with a keeper that is stopped"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_the_user_of_a_fence_is_killed_nothing_is_left(number, stopped):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout is not None
    with driver.stdout:
        keeper, outer = map(int, driver.stdout.readline().split())
        handle = psutil.Process(keeper)
        processes = seen([keeper, outer, *descendants(outer), *wait_for_children(keeper)])
        if stopped:
            handle.suspend()
        driver.send_signal(number)
        driver.wait(GONE_S)
    wait_until_gone(processes)


def test_when_the_pool_kills_a_reward_process_nothing_is_left():
    async def main() -> None:
        sleeping = f"```python\n{ASLEEP}\n```"
        task = json.dumps({"function": "f", "tests": [{"input": [], "output": 1}]})
        async with RewardPool(RewardSpec.of("python_tests"), timeout_s=GONE_S) as pool:
            (process,) = pool.alive
            score = asyncio.create_task(pool.score([sleeping], [task]))
            processes = seen(wait_for_children(process.child.pid))
            await put_forward(2 * GONE_S)
            (result,) = await score
            assert "timeout" in str(result)
            wait_until_gone(processes)
            assert await pool.score(["def f(): return 1"], [task]) == [1.0]

    run_ahead(main())


@in_a_loop
async def test_a_call_that_is_cancelled_ends_what_it_runs():
    async with Sandbox(LIMITS) as sandbox:
        running = asyncio.create_task(sandbox.run_python(ASLEEP))
        worker = await busy_worker(sandbox)
        processes = seen([worker.keeper, *descendants(worker.keeper)])
        assert len(processes) == 2
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        wait_until_gone(processes)
        assert await sandbox.call("def f(): return 1", "f", [[]]) == [Value(1)]


@in_a_loop
async def test_an_execution_whose_fence_is_killed_is_made_once_more():
    async with Sandbox(LIMITS) as sandbox:
        running = asyncio.create_task(sandbox.run_python(TOLD))
        worker = await busy_worker(sandbox)
        signal_keeper(worker, signal.SIGKILL)
        await tell(await busy_worker(sandbox, other_than=worker.keeper))
        assert (await running).stdout == "1\n"
        (worker,) = sandbox.alive
        wait_until_gone([signal_keeper(worker, signal.SIGKILL)])  # while nothing runs
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"
        running = asyncio.create_task(sandbox.run_python(ASLEEP))
        keeper = 0
        for _ in range(2):
            worker = await busy_worker(sandbox, other_than=keeper)
            keeper = signal_keeper(worker, signal.SIGKILL).pid
        assert (await running).reason == "lost"


@in_a_loop
async def test_closing_ends_what_runs():
    sandbox = Sandbox(LIMITS)
    await sandbox.start()
    running = asyncio.create_task(sandbox.run_python(ASLEEP))
    worker = await busy_worker(sandbox)
    processes = seen([worker.keeper, *descendants(worker.keeper)])
    sandbox.close()
    wait_until_gone(processes)
    assert (await running).reason == "lost"
    with pytest.raises(NotStarted):
        await sandbox.run_python("print(1)")


@in_a_loop
async def test_a_keeper_that_does_not_answer_is_taken_down(monkeypatch):
    monkeypatch.setattr("penstock.workers.sandbox.sandbox_worker.GRACE_S", 0.2)
    async with Sandbox() as sandbox:
        (worker,) = sandbox.alive
        keeper = signal_keeper(worker, signal.SIGSTOP)
        assert (await sandbox.run_python("print(1)", wall_s=0.2)).reason == "timeout_wall"
        wait_until_gone([keeper])
        assert (await sandbox.run_python("print(1)")).stdout == "1\n"


LEAVER = """
import asyncio
from penstock.workers.sandbox.sandbox import BlockingSandbox
from penstock.workers.agents.toolbox import python, sandboxes
sandbox = BlockingSandbox()
sandbox.start()
asyncio.run(python("1"))
workers = [*sandbox.sandbox.alive, *(worker for one in sandboxes.values() for worker in one.alive)]
print([str(directory) for worker in workers if worker.cgroup for directory in worker.cgroup.directories])
print([worker.keeper for worker in workers])
"""


def test_a_process_that_ends_without_closing_leaves_no_cgroup():
    done = subprocess.run([sys.executable, "-c", LEAVER], capture_output=True, text=True, timeout=900, check=True)
    groups, keepers = map(ast.literal_eval, done.stdout.splitlines())
    wait_until_gone(seen(keepers))
    assert len(keepers) == 2
    assert not [group for group in groups if os.path.exists(group)]


@in_a_loop
async def test_a_closed_sandbox_leaves_no_process_and_no_cgroup():
    async with Sandbox(num_workers=2) as sandbox:
        await asyncio.gather(*(sandbox.run_python("import time\ntime.sleep(0.2)") for _ in range(2)))
        workers: list[FenceWorker] = list(sandbox.alive)
        assert len(workers) == 2
        groups = [directory for worker in workers if worker.cgroup for directory in worker.cgroup.directories]
        keepers = seen(worker.keeper for worker in workers)
    wait_until_gone(keepers)
    assert not [directory for directory in groups if directory.exists()]
    assert all(worker.process.returncode is not None for worker in workers)
