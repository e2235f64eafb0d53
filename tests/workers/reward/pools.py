"""Pools of rewards for tests, and a file of rewards that misbehave as their response says."""

import asyncio
import json
import time
from pathlib import Path

from penstock.conf.reward import RewardConfig
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
from tests.virtual_time import put_forward, run_ahead

PATIENCE_S = 60.0
"""A deadline that no sample misses on a busy machine, unless it never ends."""
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

def hangs():  # from here on
    with open(__file__ + ".hangs", "a") as file: file.write("x")

def act(response):
    if response == "raise": raise RuntimeError("no judge")
    if response == "exit": os._exit(3)
    if response == "sysexit": sys.exit("bye")
    if response == "cancelled": raise asyncio.CancelledError("by itself")
    if response == "generatorexit": raise GeneratorExit("bye")
    if response == "huge": return 10**400
    if response == "segfault": ctypes.string_at(0)
    if response == "hang": hangs(); time.sleep(600)
    if response == "spin":
        hangs()
        while True: pass
    if response == "nan": return float("nan")
    if response == "none": return None
    if response == "text": return "1.0"
    if response == "print": print("hello"); print("hello", file=sys.stderr); os.write(1, b"raw"); return 1.0
    if response == "input": return float(len(sys.stdin.read()))
    if response == "child":
        child = subprocess.Popen(["sleep", "600.125"])  # nobody else's duration
        hangs(); child.wait()
    if response == "long": raise RuntimeError("no " * 10_000_000)
    if response == "unspeakable": raise Unspeakable
    if response == "surrogate": raise RuntimeError(chr(0xD800))
    if response == "garbage": return tell(bytes(range(256)))
    if response == "deep": return tell(b"[" * 60_000)
    if response == "giant": return tell(b"[" + b" " * 2**17 + b"]")
    if response == "infinite": return tell(json.dumps(["score", 0, float("inf")]).encode())
    if response == "stranger": return tell(json.dumps(["score", 99, 1.0]).encode())
    if response == "twice": return tell(json.dumps(["score", 0, 1.0]).encode())
    if response == "half": os.write(int(sys.argv[1]), b'["score"'); hangs(); time.sleep(600)
    if response == "done": return tell(b'["done"]')
    if response.startswith("pickle "): return tell(pickle.dumps((0, Touch(response[7:]))))
    if response == "pid": return float(os.getpid())
    return float(len(response))

def plain(response, task): return act(response)
def verl(data_source, solution_str, ground_truth, extra_info=None): return {"score": act(solution_str)}
def trl(prompts, completions, **columns): return [act(completion) for completion in completions]
def wrong_length(completions, **columns): return [1.0] * (len(completions) + ("bad" in completions))
def slow_for_many(completions, **columns):
    if len(completions) > 2: hangs(); time.sleep(600)
    return [1.0] * len(completions)

through = []
async def waiting(response, task):
    if response == "wait":  # until its deadline, which comes when the two others of its batch are told
        while len(through) < 2: await asyncio.sleep(0.001)
        for _ in range(10): await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        now, loop.time = loop.time, lambda: now() + 600
        await asyncio.sleep(1200)
    await asyncio.sleep(0.05)
    through.append(response)
    return act(response)
"""


def pool_of(function, **config):
    config = RewardConfig(**{"timeout_s": PATIENCE_S, **config})
    return RewardPool.of(config, RewardSpec.of(function, config.options))


def scored(function, responses, *, task=None, **config):
    """Results and seconds of one call, in a pool of one process (unless told otherwise)."""

    async def run():
        async with pool_of(function, **config) as pool:
            started = time.perf_counter()
            results = await pool.score(responses, [json.dumps(task or {"prompt": "p", "answer": "a"})] * len(responses))
            seconds = time.perf_counter() - started
            assert len(pool.alive) <= pool.num_processes
            return results, seconds

    return asyncio.run(run())


async def score_past_hangs(behaviours, pool, responses):
    """The clock is put forward past the deadline of each sample that says it hangs, and of no other."""
    said = Path(f"{behaviours}.hangs")
    before = _size(said)
    scoring = asyncio.ensure_future(pool.score(responses, ["{}"] * len(responses)))
    while not scoring.done():
        await asyncio.wait([scoring], timeout=0.01)
        if _size(said) > before:
            before = _size(said)
            await put_forward(2 * PATIENCE_S)
    return await scoring


def scored_past_hangs(behaviours, kind, responses):
    """Results of one call, in a pool of one process. In the loop of `run_ahead`."""

    async def run():
        async with pool_of(f"{behaviours}:{kind}") as pool:
            return await score_past_hangs(behaviours, pool, responses)

    return run_ahead(run())


def _size(file):
    return file.stat().st_size if file.exists() else 0
