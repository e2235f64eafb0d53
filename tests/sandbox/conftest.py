"""One fence for a file of attacks, and a judge as rewards are: it knows what is right, and the code does not."""

import asyncio
import functools
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from penstock.conf.environment import SandboxConfig
from penstock.workers.reward.code import python_tests
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox import BlockingSandbox
from penstock.workers.sandbox.sandbox_worker import FenceWorker

LIMITS: dict[str, Any] = {"cpu_s": 1, "memory_mib": 256, "num_processes": 16, "tmp_mib": 8, "tmp_files": 64}
ATTACK_S = 1.5
"""Seconds of wall clock: what an attack gets done, it gets done at once. The code after it has as long as usual."""
HUNGRY = """
import os, time
for _ in range(3):
    if os.fork() == 0: break
kept = bytearray(200 << 20)
for place in range(0, 200 << 20, 4096): kept[place] = 1
time.sleep(30)
"""
"""Four processes, each within the limit for one."""
HONEST = "def solve(x):\n    return [x, x * 2]\n"


@pytest.fixture(scope="module")
def fence() -> Iterator[BlockingSandbox]:
    limits = Limits.of(SandboxConfig(**LIMITS, wall_s=60))  # whatever else the machine does
    fence = BlockingSandbox(limits)
    fence.start()
    yield fence
    fence.close()


@pytest.fixture
def score() -> Callable[[str], float]:
    """The reward of a piece of code that is asked for what it cannot know: a number drawn for this test."""

    def score(source: str) -> float:
        secret = secrets.token_hex(16)
        task = {"function": "solve", "tests": [{"input": [index], "output": secret} for index in range(3)]}
        given = python_tests(f"```python\n{source}\n```", task, limits=LIMITS, budget_s=ATTACK_S)
        honest = {"function": "solve", "tests": [{"input": [5], "output": [5, 10]}]}
        assert python_tests(HONEST, honest, limits=LIMITS) == 1.0, "the attack has harmed who came after it"
        return given

    return score


class Group:
    """A control group that is none, and ends nobody."""

    version = 1

    def __init__(self, cpu_s: float | None) -> None:
        """`cpu_s`: what it says of processor time."""
        self._cpu_s = cpu_s

    def cpu_s(self) -> float | None:
        return self._cpu_s

    def num_killed(self) -> int:
        return 0

    def remove(self) -> None:
        """There is nothing."""


def worker_of(fence: BlockingSandbox) -> FenceWorker:
    """The fence that stands ready."""
    (worker,) = fence.sandbox.alive
    return worker


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test, in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **more: Any) -> None:
        asyncio.run(test(*arguments, **more))

    return run
