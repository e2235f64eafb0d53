"""Cost of a slow engine for a step, with and without a second engine that samples its groups too.

    .venv/bin/python -m benchmarks.stragglers

Four scripted engines (a timer instead of a model), the real store and rollout workers, in one process. Three engines
are alike; the fourth is five times slower in one case, and alike too in another: what the offers cost where none is
slow. In the third, engines have room for one group each, so groups are free while a slow one is not offered to
another: the process's CPU time says what the store does meanwhile. Lengths of responses are log-normal, so groups
differ as those of models do. A trainer takes 16 groups a step, for no time, and lets up to one version of staleness be.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from penstock.algorithms.graph.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, STANDARD_COLUMNS
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.spec import StageSpec, StoreSpec
from penstock.workers.protocols import Publication, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_worker import GroupIntake, RolloutWorker

NUM_ENGINES, GROUPS, SAMPLES, MEDIAN_TOKENS, SPREAD = 4, 16, 4, 100, 0.4
TOKENS_PER_S = 500.0
FACTORS = (0.0, 3.0)
ALIKE, SLOW, FULL = "alike", "one is 5x slower", "one is 5x slower, all are full"
SLOWER = {ALIKE: 1.0, SLOW: 5.0, FULL: 5.0}
ROOM = {ALIKE: GROUPS, SLOW: GROUPS, FULL: 1}
"""Number of groups that an engine samples at a time."""


def length_of(prompt: Sequence[int], sample: int) -> int:
    """Length of a response: log-normal, and the same for every engine that samples it."""
    return max(1, round(MEDIAN_TOKENS * math.exp(SPREAD * Random(f"{list(prompt)}/{sample}").gauss(0, 1))))


def make_store(factor: float) -> Store:
    columns = (*PROMPT_COLUMNS, *ROLLOUT_COLUMNS)
    stages = (
        StageSpec("rollout", "group", ("prompt_ids",), ROLLOUT_COLUMNS),
        StageSpec("train", "batch", ("prompt_ids", *ROLLOUT_COLUMNS), ()),
    )
    return Store(
        StoreSpec(
            columns=tuple(STANDARD_COLUMNS[name] for name in columns),
            source_columns=PROMPT_COLUMNS,
            stages=stages,
            group_size=SAMPLES,
            groups_per_step=GROUPS,
            max_active_groups=2 * GROUPS,
            max_staleness=1,
            straggler_factor=factor,
        )
    )


def make_engine(number: int, slower: float) -> ScriptedEngine:
    """Make an engine. The first is the slow one."""
    return ScriptedEngine(TimeModel(tokens_per_s=TOKENS_PER_S / (slower if number == 0 else 1.0)), length=length_of)


def make_worker(number: int, engine: ScriptedEngine, room: int) -> RolloutWorker:
    sampling = Sampling(max_tokens=10 * MEDIAN_TOKENS)
    return RolloutWorker(engine, GroupIntake(f"Rollout-{number}", sampling, 1, SAMPLES, room * SAMPLES, NUM_ENGINES))


async def run(factor: float, case: str, num_steps: int, first_prompt: int) -> dict[str, Any]:
    """Measure seconds of each step after the first two, CPU seconds of them all, and the store's counts."""
    store = make_store(factor)
    client = StoreClient(store)
    engines = [make_engine(number, SLOWER[case]) for number in range(NUM_ENGINES)]
    workers = [make_worker(number, engine, ROOM[case]) for number, engine in enumerate(engines)]
    running = [asyncio.create_task(worker.run(StoreClient(store))) for worker in workers]
    groups = [{"prompt_ids": [first_prompt + number, 1], "task": "{}"} for number in range((num_steps + 4) * GROUPS)]
    putting = asyncio.create_task(client.put_groups(groups))
    seconds, before, cpu_s = [], time.perf_counter(), 0.0
    for step in range(num_steps + 2):
        if step == 2:
            cpu_s = time.process_time()
        lease = await client.lease_shared("train", step, 0, 1)
        assert lease is not None
        await client.complete_shared(lease.share)
        await asyncio.gather(*(engine.load(Publication("", step + 1)) for engine in engines))
        await client.served(step + 1)
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    cpu_s = time.process_time() - cpu_s
    putting.cancel()
    stats = await client.stats()
    await client.close("done")
    await asyncio.gather(*running)
    counts = {name: stats.get(f"stragglers/{name}", 0) for name in ("offered", "won", "late_rows")}
    aborted = sum(worker.stats()["twice_groups"] for worker in workers)
    return {"factor": factor, "case": case, "seconds": seconds[2:], "cpu_s": cpu_s, "twice_groups": aborted, **counts}


def measure(num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    rounds = []
    for number in range(num_rounds):
        for case in SLOWER:
            rounds += [asyncio.run(run(factor, case, num_steps, 10_000 * number)) for factor in FACTORS]
    return rounds


def chosen(rounds: list[dict[str, Any]], factor: float, case: str) -> list[dict[str, Any]]:
    return [entry for entry in rounds if (entry["factor"], entry["case"]) == (factor, case)]


def step_s(rounds: list[dict[str, Any]], factor: float, case: str) -> float:
    return statistics.fmean(second for entry in chosen(rounds, factor, case) for second in entry["seconds"])


def cpu_share(rounds: list[dict[str, Any]], factor: float, case: str) -> float:
    """Share of a core that the process has computed."""
    some = chosen(rounds, factor, case)
    return sum(entry["cpu_s"] for entry in some) / sum(sum(entry["seconds"]) for entry in some)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    off, on = FACTORS
    gain = step_s(rounds, off, SLOW) / step_s(rounds, on, SLOW)
    cost = step_s(rounds, on, ALIKE) / step_s(rounds, off, ALIKE)
    busier = cpu_share(rounds, on, FULL) / cpu_share(rounds, off, FULL)
    return [
        Target("a step, one engine slow: off / on", gain, "x", ">=", 1.2),
        Target("a step, engines alike: on / off", cost, "x", "<=", 1.05),
        Target("CPU time, engines full: on / off", busier, "x", "<=", 1.5),
    ]


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table(
        f"{NUM_ENGINES} engines, {GROUPS} groups a step, max_staleness=1",
        ["engines", "straggler_factor"],
        ["s a step", "groups offered", "won by the second", "of a core"],
    )
    for case in SLOWER:
        for factor in FACTORS:
            some = chosen(rounds, factor, case)
            steps = sum(len(entry["seconds"]) for entry in some)
            offered, won = (sum(entry[key] for entry in some) for key in ("offered", "won"))
            shares = f"{offered / (steps * GROUPS):.1%}", f"{won / max(1, offered):.0%}"
            busy = f"{cpu_share(rounds, factor, case):.2f}"
            table.add_row(case, f"{factor:g}", f"{step_s(rounds, factor, case):.3f}", *shares, busy)
    show(table)


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds = measure(arguments.rounds or (1 if arguments.quick else 3), 6 if arguments.quick else 20)
    print_rounds(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "stragglers", rounds, targets)


if __name__ == "__main__":
    main()
