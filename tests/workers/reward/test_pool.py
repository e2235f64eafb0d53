"""What a pool gives its processes to score, and what becomes of them when it, or who started it, ends."""

import asyncio
import os
import subprocess
import sys

import psutil
import pytest

from penstock.conf.errors import ConfigError
from tests.processes import seen, wait_until_gone
from tests.workers.reward.pools import pool_of, scored

pytestmark = pytest.mark.real


def test_callables_given_in_python_run_in_the_child_processes():
    parent = os.getpid()
    offset = 2.0

    def score(response, answer):
        return os.getpid() != parent and len(response) + offset

    assert scored(score, ["abc"])[0] == [5.0]


def test_options_of_the_configuration_reach_the_function():
    def score(response, task, scale=1.0):
        return scale

    assert scored(score, ["abc"], options={"scale": 2.5})[0] == [2.5]


def test_tasks_reach_the_function_as_objects_of_their_own():
    def score(response, task):
        task["seen"] = task.get("seen", 0) + 1
        return task["seen"] + task["answer"]["value"]

    assert scored(score, ["a", "b"], task={"prompt": "p", "answer": {"value": 1}})[0] == [2.0, 2.0]


def test_a_function_that_cannot_be_loaded_stops_the_start(tmp_path):
    (tmp_path / "broken.py").write_text("import nonexistent_thing\n")
    with pytest.raises(ConfigError, match="nonexistent_thing"):
        scored(f"{tmp_path}/broken.py:score", ["a"])


def test_several_processes_share_a_batch(behaviours):
    results, _ = scored(f"{behaviours}:plain", ["pid"] * 8, num_processes=2)
    assert len(set(results)) == 2


def test_a_process_that_dies_idle_is_replaced_and_no_sample_blamed(behaviours):
    async def run():
        async with pool_of(f"{behaviours}:plain") as pool:
            (pid,) = await pool.score(["pid"], ["{}"])
            os.kill(int(pid), 9)
            await asyncio.sleep(0.1)
            return await pool.score(["a", "bb"], ["{}"] * 2), pool.replaced

    assert asyncio.run(run()) == ([1.0, 2.0], 1)


def test_concurrent_calls_get_their_own_results(behaviours):
    async def run():
        async with pool_of(f"{behaviours}:plain", num_processes=2) as pool:
            return await asyncio.gather(*(pool.score(["x" * n] * 3, ["{}"] * 3) for n in range(1, 9))), pool.replaced

    assert asyncio.run(run()) == ([[float(n)] * 3 for n in range(1, 9)], 0)


def test_closing_kills_even_a_process_that_hangs(behaviours):
    async def run():
        pool = pool_of(f"{behaviours}:plain", timeout_s=60)
        await pool.start()
        pids = [process.child.pid for process in pool.alive]
        call = asyncio.create_task(pool.score(["spin"], ["{}"]))
        await asyncio.sleep(0.1)
        await pool.close()
        outcome = await asyncio.gather(call, return_exceptions=True)
        return pids, outcome

    pids, outcome = asyncio.run(run())
    assert "closed" in str(outcome[0])
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_children_die_with_their_parent_even_while_they_hang(behaviours):
    program = f"""
import asyncio, os
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
async def main():
    pool = RewardPool(RewardSpec.of({behaviours + ":plain"!r}), timeout_s=60)
    await pool.start()
    print(*[process.child.pid for process in pool.alive], flush=True)
    asyncio.create_task(pool.score(["spin"], ["{{}}"]))
    await asyncio.sleep(0.3)
    os._exit(1)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)
    wait_until_gone(seen([int(done.stdout)]))


def test_batch_after_batch_is_scored_by_the_same_processes():
    async def run():
        async with pool_of("digits") as pool:
            before = [process.child.pid for process in pool.alive]
            for _ in range(20):
                await pool.score(["42"] * 64, ['{"prompt": "p"}'] * 64)
            return before, [process.child.pid for process in pool.alive], pool.replaced

    before, after, replaced = asyncio.run(run())
    assert (sorted(after), replaced) == (sorted(before), 0)
