"""A reward that hangs, crashes, raises or returns nonsense costs its own sample, and nothing else."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from penstock.conf.errors import ConfigError
from penstock.conf.reward import RewardConfig
from penstock.workers.reward.outcome import MAX_TEXT, RewardError
from penstock.workers.reward.pool import RewardPool
from penstock.workers.reward.registry import RewardSpec

BEHAVIOURS = """
import asyncio, ctypes, json, os, pickle, subprocess, sys, time

class Unspeakable(Exception):
    def __str__(self): raise ValueError

class Touch:
    def __init__(self, path): self.path = path
    def __reduce__(self): return open, (self.path, "w")

def tell(line):  # to the pool, past Penstock
    os.write(int(sys.argv[1]), line + b"\\n")
    return 1.0

def act(response):
    if response == "raise": raise RuntimeError("no judge")
    if response == "exit": os._exit(3)
    if response == "sysexit": sys.exit("bye")
    if response == "segfault": ctypes.string_at(0)
    if response == "hang": time.sleep(600)
    if response == "spin":
        while True: pass
    if response == "nan": return float("nan")
    if response == "none": return None
    if response == "text": return "1.0"
    if response == "print": print("hello"); print("hello", file=sys.stderr); os.write(1, b"raw"); return 1.0
    if response == "input": return float(len(sys.stdin.read()))
    if response == "child": subprocess.run(["sleep", "600"])
    if response == "long": raise RuntimeError("no " * 10_000_000)
    if response == "unspeakable": raise Unspeakable
    if response == "surrogate": raise RuntimeError(chr(0xD800))
    if response == "garbage": return tell(bytes(range(256)))
    if response == "deep": return tell(b"[" * 60_000)
    if response == "giant": return tell(b"[" + b" " * 2**17 + b"]")
    if response == "infinite": return tell(json.dumps(["score", 0, float("inf")]).encode())
    if response == "stranger": return tell(json.dumps(["score", 99, 1.0]).encode())
    if response == "twice": return tell(json.dumps(["score", 0, 1.0]).encode())
    if response == "half": os.write(int(sys.argv[1]), b'["score"'); time.sleep(600)
    if response == "done": return tell(b'["done"]')
    if response.startswith("pickle "): return tell(pickle.dumps((0, Touch(response[7:]))))
    if response == "pid": return float(os.getpid())
    return float(len(response))

def plain(response, task): return act(response)
def verl(data_source, solution_str, ground_truth, extra_info=None): return {"score": act(solution_str)}
def trl(prompts, completions, **columns): return [act(completion) for completion in completions]
def wrong_length(completions, **columns): return [1.0] * (len(completions) + ("bad" in completions))
def slow_for_many(completions, **columns):
    time.sleep(0.2 * len(completions)); return [1.0] * len(completions)
async def waiting(response, task):
    if response == "wait": await asyncio.sleep(600)
    await asyncio.sleep(0.05)
    return act(response)
"""


@pytest.fixture(scope="module")
def behaviours(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "behaviours.py"
    path.write_text(BEHAVIOURS)
    return str(path)


def pool_of(function, **config):
    config = RewardConfig(**{"timeout_s": 5.0, **config})
    return RewardPool.of(config, RewardSpec.of(function, config.options))


def scored(function, responses, *, task=None, **config):
    """Results and seconds of one call, in a pool of one process (unless told otherwise)."""

    async def run():
        async with pool_of(function, **config) as pool:
            started = time.perf_counter()
            results = await pool.score(responses, [json.dumps(task or {"prompt": "p", "answer": "a"})] * len(responses))
            seconds = time.perf_counter() - started
            assert len(pool._alive) <= pool.num_processes
            return results, seconds

    return asyncio.run(run())


BAD = {
    "raise": ("raised", "RuntimeError: no judge"),
    "nan": ("bad_value", "nan"),
    "none": ("bad_value", "None"),
    "text": ("bad_value", "str '1.0'"),
    "sysexit": ("raised", "SystemExit: bye"),
    "exit": ("crash", "exit code 3"),
}


@pytest.mark.parametrize("kind", ["plain", "verl", "trl", "waiting"])
def test_failing_samples_cost_themselves_only(behaviours, kind):
    results, _ = scored(f"{behaviours}:{kind}", ["a", *BAD, "bb"])
    assert (results[0], results[-1]) == (1.0, 2.0)
    for error, (error_kind, text) in zip(results[1:-1], BAD.values(), strict=True):
        assert error.kind == error_kind
        assert text in error.text


def test_the_error_of_a_raise_has_the_line_that_raised(behaviours):
    (error,), _ = scored(f"{behaviours}:plain", ["raise"])
    assert 'raise RuntimeError("no judge")' in error.text
    assert "behaviours.py:" in error.text


@pytest.mark.parametrize(("response", "text"), [("long", "RuntimeError: no no"), ("unspeakable", "ValueError")])
def test_the_text_of_an_error_is_short_and_always_there(behaviours, response, text):
    (error, after), _ = scored(f"{behaviours}:plain", [response, "a"])
    assert (error.kind, after) == ("raised", 1.0)
    assert text in error.text
    assert "behaviours.py:" in error.text
    assert len(error.text) <= MAX_TEXT


def test_the_text_of_an_error_can_be_written_as_utf8(behaviours):
    (error,), _ = scored(f"{behaviours}:plain", ["surrogate"])
    assert error.text.encode().startswith(b"RuntimeError: ?")


@pytest.mark.parametrize("bad", ["garbage", "deep", "giant", "infinite", "stranger", "twice", "done"])
def test_a_process_that_talks_nonsense_costs_one_sample_and_is_replaced(behaviours, bad):
    async def run():
        async with pool_of(f"{behaviours}:plain") as pool:
            return await pool.score(["a", bad, "ccc"], ["{}"] * 3), pool.replaced

    results, replaced = asyncio.run(asyncio.wait_for(run(), 30))
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "crash"
    assert replaced == 1


def test_what_a_process_sends_is_never_unpickled(behaviours, tmp_path):
    (error,), _ = scored(f"{behaviours}:plain", [f"pickle {tmp_path}/touched"])
    assert error.kind == "crash"
    assert list(tmp_path.iterdir()) == []


def score_while_stopped(behaviours, act_on, **config):
    """Results of a batch that is larger than what a socket holds, sent to a process that takes nothing of it."""

    async def run():
        async with pool_of(f"{behaviours}:plain", **config) as pool:
            (process,) = pool._alive
            os.kill(process.child.pid, signal.SIGSTOP)
            call = asyncio.create_task(pool.score(["x" * 2**21, "a", "bb"], ["{}"] * 3))
            while not process.writer.transport.get_write_buffer_size():
                await asyncio.sleep(0)
            act_on(process.child.pid)
            return await asyncio.wait_for(call, 30)

    return asyncio.run(run())


def test_a_process_that_dies_while_it_takes_a_batch_costs_one_sample(behaviours):
    results = score_while_stopped(behaviours, lambda pid: os.kill(pid, signal.SIGKILL))
    assert results[1:] == [1.0, 2.0]
    assert results[0].kind == "crash"
    assert "SIGKILL" in results[0].text


def test_a_process_that_does_not_take_its_batch_is_killed_at_the_deadline(behaviours):
    results = score_while_stopped(behaviours, lambda pid: None, timeout_s=0.3)
    assert results[1:] == [1.0, 2.0]
    assert results[0].kind == "timeout"


def test_a_segmentation_fault_costs_its_own_sample(behaviours):
    results, _ = scored(f"{behaviours}:plain", ["a", "segfault", "ccc"])
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "crash"
    assert "SIGSEGV" in results[1].text


@pytest.mark.parametrize(
    ("kind", "bad"), [("plain", "hang"), ("plain", "spin"), ("plain", "half"), ("trl", "hang"), ("waiting", "spin")]
)
def test_a_hanging_sample_is_killed_at_its_deadline(behaviours, kind, bad):
    results, _ = scored(f"{behaviours}:{kind}", ["a", bad, "ccc"], timeout_s=0.5)
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "timeout"
    assert "reward.timeout_s=0.5" in results[1].text


def test_a_hanging_sample_is_known_within_a_second(behaviours):
    async def run():
        async with pool_of(f"{behaviours}:plain", timeout_s=0.5) as pool:
            started = time.perf_counter()
            async for index, _ in pool.stream(["spin"], ["{}"]):
                return index, time.perf_counter() - started
        return None

    index, seconds = asyncio.run(run())
    assert index == 0
    assert 0.5 <= seconds < 1.0


def test_an_async_sample_that_waits_too_long_costs_no_process(behaviours):
    results, seconds = scored(f"{behaviours}:waiting", ["a", "wait", "ccc"], timeout_s=0.5)
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "timeout"
    assert seconds < 2.0


def test_async_samples_of_a_batch_wait_at_the_same_time(behaviours):
    results, seconds = scored(f"{behaviours}:waiting", ["a"] * 40)
    assert results == [1.0] * 40
    assert seconds < 1.8  # one after the other: 2 s


def test_two_hanging_samples_leave_the_rest_scored(behaviours):
    results, _ = scored(f"{behaviours}:plain", ["hang", "b", "hang", "d"], timeout_s=0.3)
    assert [isinstance(r, RewardError) for r in results] == [True, False, True, False]


def test_wrong_length_is_isolated_to_the_sample_that_causes_it(behaviours):
    results, _ = scored(f"{behaviours}:wrong_length", ["ok", "bad", "ok"])
    assert results[::2] == [1.0, 1.0]
    assert "2 values for 1 sample" in results[1].text


def test_a_batch_function_that_needs_longer_for_many_samples_gets_smaller_batches(behaviours):
    async def run():
        async with pool_of(f"{behaviours}:slow_for_many", timeout_s=0.5) as pool:
            first = await pool.score(["x"] * 4, ["{}"] * 4)
            replaced = pool.replaced
            second = await pool.score(["x"] * 4, ["{}"] * 4)
            return first, second, replaced, pool.replaced

    first, second, before, after = asyncio.run(run())
    assert first == second == [1.0] * 4
    assert before == after == 1


def test_prints_go_to_the_log_and_not_into_the_protocol(behaviours, capfd):
    results, _ = scored(f"{behaviours}:plain", ["print", "bb"])
    assert results == [1.0, 2.0]
    out = capfd.readouterr()
    assert "hello" in out.out
    assert "raw" in out.out
    assert "hello" in out.err


def test_a_reward_that_reads_standard_input_sees_its_end(behaviours):
    assert scored(f"{behaviours}:plain", ["input"])[0] == [0.0]


def test_what_a_killed_reward_has_started_is_killed_with_it(behaviours):
    before = _sleepers()
    results, _ = scored(f"{behaviours}:plain", ["child"], timeout_s=0.5)
    assert results[0].kind == "timeout"
    assert _sleepers() <= before


def _sleepers() -> int:
    return sum(process.info["cmdline"] == ["sleep", "600"] for process in psutil.process_iter(["cmdline"]))


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
        pids = [process.child.pid for process in pool._alive]
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
from penstock.workers.reward.pool import RewardPool
from penstock.workers.reward.registry import RewardSpec
async def main():
    pool = RewardPool(RewardSpec.of({behaviours + ":plain"!r}), timeout_s=60)
    await pool.start()
    print(*[process.child.pid for process in pool._alive], flush=True)
    asyncio.create_task(pool.score(["spin"], ["{{}}"]))
    await asyncio.sleep(0.3)
    os._exit(1)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=2.5)  # it has nobody else to wait for it


def test_a_trivial_reward_costs_a_few_milliseconds_a_batch():
    async def run():
        async with pool_of("digits") as pool:
            times = []
            for _ in range(20):
                started = time.perf_counter()
                await pool.score(["42"] * 64, ['{"prompt": "p"}'] * 64)
                times.append(time.perf_counter() - started)
            return min(times), pool.replaced

    seconds, replaced = asyncio.run(run())
    assert replaced == 0
    assert seconds < 0.02  # 1-2 ms on an idle machine
