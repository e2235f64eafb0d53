"""Attempts whose number follows a small KV memory of vLLM, against fixed numbers of them.

    python -m benchmarks.agents.memory --json memory.json

Attempts have one to five turns, between which a tool adds tokens. Their number follows the engine's reports
(`workers/agents/admission.py`), is the upper bound alone (1,024), or is fixed. All sides alternate on one engine.
"""

import asyncio
import random
import statistics
import time
from contextlib import suppress
from typing import Any

from benchmarks.agents.engine import Engine, engine
from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from penstock.conf.environment import EnvironmentConfig
from penstock.workers.agents.admission import AdmissionControl, AttemptGate, TurnShape
from penstock.workers.agents.attempts import AttemptRunner
from penstock.workers.agents.attempts_actor import REPORT_S, kv_load
from penstock.workers.agents.environment import Context, Task
from penstock.workers.agents.gateway.http_server import AttemptKeys
from penstock.workers.protocols import Sampling

BOUND = 1024
FIXED = (8, 16, 32)
KV_GIB, NUM_SAMPLES = 0.1, 128
TOKENS = 32
RATE, PREEMPTED = 0.95, 0.05
"""Least share of the best fixed number's rate, and most of the upper bound's preemptions."""
LEAST_PREEMPTED = 100
"""Preemptions of the upper bound from which on they are compared."""


class Growing:
    """Conversations of one to five turns, each with a longer question than its answer."""

    async def run(self, task: Task, ctx: Context) -> None:
        draws = random.Random(task.seed)
        messages: list[Any] = []
        for _ in range(draws.randint(1, 5)):
            words = " ".join(str(draws.randrange(10**6)) for _ in range(draws.randint(2, 12)))
            turn = await ctx.sample([*messages, {"role": "user", "content": words}])
            messages += [{"role": "user", "content": words}, turn.message]


async def measure(one: Engine, num_attempts: int, number: int | None) -> dict[str, Any]:
    """Play attempts. `number`: of those that are under way at once; None: it follows the memory."""
    control = AdmissionControl(BOUND, follows=True) if number is None else AdmissionControl(number)
    gate = AttemptGate(control)
    runner = AttemptRunner(Growing(), EnvironmentConfig(), one.sampler, AttemptKeys(), gate=gate, counts=one.counts)

    async def follow() -> None:
        while True:
            sampled = max(1, one.counts["tokens_sampled"])
            shape = TurnShape(one.counts["tokens_added"] / sampled, one.counts["tokens_continued"] / sampled)
            gate.report({"Rollout-0": await kv_load(one.handle)}, one.pool, shape)
            await asyncio.sleep(REPORT_S)

    following = asyncio.create_task(follow()) if number is None else None
    before, began = await kv_load(one.handle), time.perf_counter()
    samplings = [Sampling(max_tokens=TOKENS, ignore_eos=True, seed=index) for index in range(num_attempts)]
    await asyncio.gather(*(runner.attempt(Task(str(i), i), sampling) for i, sampling in enumerate(samplings)))
    seconds, after = time.perf_counter() - began, await kv_load(one.handle)
    assert before is not None
    assert after is not None
    if following is not None:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    preempted = after.num_preempted - before.num_preempted
    return {"side": "auto" if number is None else str(number), "per_s": num_attempts / seconds, "preempted": preempted}


async def rounds(one: Engine, num_rounds: int, num_attempts: int) -> list[dict[str, Any]]:
    await measure(one, num_attempts // 4, 16)  # the first is not counted
    return [await measure(one, num_attempts, number) for _ in range(num_rounds) for number in (None, BOUND, *FIXED)]


def main() -> None:
    arguments = parse_arguments(__doc__)
    with engine(NUM_SAMPLES, KV_GIB) as one:
        num_rounds = arguments.rounds or (1 if arguments.quick else 3)
        rows = asyncio.run(rounds(one, num_rounds, 32 if arguments.quick else 192))
    table = new_table("Attempts by KV memory", ["number"], ["a second, median", "preemptions", "rounds"])
    rates, preempted = dict[str, float](), dict[str, float]()
    for side in dict.fromkeys(row["side"] for row in rows):
        own = [row for row in rows if row["side"] == side]
        rates[side] = statistics.median(row["per_s"] for row in own)
        preempted[side] = statistics.median(row["preempted"] for row in own)
        each = ", ".join(f"{row['per_s']:.2f}" for row in own)
        table.add_row(side, f"{rates[side]:.2f}", f"{preempted[side]:,.0f}", each)
    show(table)
    best = max(rate for side, rate in rates.items() if side != "auto")
    name = "attempts/s that follow the memory, of the best fixed number's"
    targets = [Target(name, rates["auto"] / best, "x", ">=", RATE)]
    if (most := preempted[str(BOUND)]) >= LEAST_PREEMPTED:
        targets.append(Target("preemptions, of the upper bound's", preempted["auto"] / most, "x", "<=", PREEMPTED))
    print_targets(targets)
    write_json(arguments.json, "memory", rows, targets)


if __name__ == "__main__":
    main()
