"""A thousand attempts on one engine that mostly wait for tools, against the same attempts without a wait.

Each attempt has three turns, and a tool between them that takes seconds. What is compared is the tokens a second of the
middle half of all tokens: at the beginning the first turns fill the engine on both sides, and at the end the last waits
leave it idle, in any case.
"""

import asyncio
import random
import time
from typing import Any

from benchmarks.agents.engine import Engine
from benchmarks.harness import Target
from penstock.conf.environment import EnvironmentConfig
from penstock.workers.agents.attempts import AttemptRunner
from penstock.workers.agents.environment import Context, Task
from penstock.workers.agents.gateway.http_server import AttemptKeys
from penstock.workers.protocols import Sampling

TURNS, TOKENS = 3, 32
WAIT_S = (2.0, 6.0)
"""Shortest and longest seconds of a tool call: mostly several times as long as its turn."""
TARGET = 0.85


class Waiting:
    """An environment that notes when each turn's tokens came."""

    def __init__(self, wait_s: tuple[float, float]) -> None:
        self._wait_s = wait_s
        self.came: list[tuple[float, int]] = []
        self.waited_s = self.sampling_s = 0.0

    async def run(self, task: Task, ctx: Context) -> None:
        draws = random.Random(task.seed)
        messages: list[Any] = [{"role": "user", "content": f"attempt {task.id}"}]
        for _ in range(TURNS):
            began = time.perf_counter()
            turn = await ctx.sample(messages)
            self.came.append((time.perf_counter(), len(turn.output_ids)))
            self.sampling_s += time.perf_counter() - began
            seconds = draws.uniform(*self._wait_s)
            self.waited_s += seconds
            await asyncio.sleep(seconds)
            messages += [turn.message, {"role": "user", "content": "the tool has answered"}]

    def plateau(self) -> float:
        """Rate of the middle half, in tokens a second."""
        total, so_far = sum(count for _, count in self.came), 0
        bounds = []
        for at, count in sorted(self.came):
            so_far += count
            if (len(bounds) == 0 and so_far >= total / 4) or (len(bounds) == 1 and so_far >= 3 * total / 4):
                bounds.append((at, so_far))
        (first, before), (last, after) = bounds
        return (after - before) / (last - first)


async def rounds(engine: Engine, num_rounds: int, num_attempts: int) -> list[dict[str, Any]]:
    found = []
    for number in range(num_rounds):
        for side, wait_s in (("none", (0.0, 0.0)), ("waits", WAIT_S)):
            environment = Waiting(wait_s)
            runner = AttemptRunner(environment, EnvironmentConfig(max_turns=TURNS), engine.sampler, AttemptKeys())
            samplings = [
                Sampling(max_tokens=TOKENS, ignore_eos=True, seed=number * num_attempts + index)
                for index in range(num_attempts)
            ]
            await asyncio.gather(
                *(runner.attempt(Task(f"{number}/{index}", index), one) for index, one in enumerate(samplings))
            )
            share = environment.waited_s / max(1e-9, environment.waited_s + environment.sampling_s)
            found.append({"part": "waiting", "side": side, "per_s": environment.plateau(), "waiting_share": share})
    return found


def targets(rows: list[dict[str, Any]], median: Any) -> list[Target]:
    ratio = median(rows, "waits") / median(rows, "none")
    return [Target("1,000 attempts that wait for tools, of those that do not", ratio, "x", ">=", TARGET)]
