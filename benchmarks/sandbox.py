"""Rate of small executions of Python in the sandbox, with interpreters that stand ready and without.

    .venv/bin/python -m benchmarks.sandbox

An execution is a call of `Sandbox.call`: the code of a function and three lists of arguments go in, three values come
out, from a process, a PID namespace and a /tmp of its own. It counts as one. "warm": workers keep an interpreter behind
a fence, which forks. "cold": each execution has a fence of its own, a new interpreter in it, and both are taken down.
There are as many workers as cores, and the cores are shared with this process, which hands out and compares.
Other work on the machine lowers the rates; the table says its load.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from penstock.workers.sandbox.execution import Value
from penstock.workers.sandbox.sandbox import Sandbox

CODE = """
def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps
"""
CALLS, EXPECTED = [[1], [7], [27]], [Value(0), Value(16), Value(111)]
KINDS = {"warm": (True, 300.0), "cold": (False, 25.0)}
"""Kinds of execution: whether fences are used again, and the executions a second to reach."""


async def run(kind: str, count: int) -> dict[str, Any]:
    """Measure executions a second, once the fences stand, each of them checked."""
    sandbox = Sandbox(num_workers=os.cpu_count() or 1, reuse=KINDS[kind][0])
    await executed(sandbox, 2 * (os.cpu_count() or 1))
    started = time.perf_counter()
    await executed(sandbox, count)
    seconds = time.perf_counter() - started
    sandbox.close()
    return {"kind": kind, "per_s": count / seconds}


async def executed(sandbox: Sandbox, count: int) -> None:
    results = await asyncio.gather(*(sandbox.call(CODE, "collatz", CALLS) for _ in range(count)))
    assert all(result == EXPECTED for result in results)


def measure(num_rounds: int, counts: dict[str, int]) -> list[dict[str, Any]]:
    """Measure rounds of both kinds. They alternate, so that what else the machine does hits both."""
    return [asyncio.run(run(kind, counts[kind])) for _ in range(num_rounds) for kind in KINDS]


def of_kind(rounds: list[dict[str, Any]], kind: str, what: str, summary: Callable[[list[float]], float]) -> float:
    return summary([entry[what] for entry in rounds if entry["kind"] == kind])


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    return [
        Target(
            f"{kind} executions, {os.cpu_count()} cores",
            of_kind(rounds, kind, "per_s", statistics.median),
            "/s",
            ">=",
            goal,
        )
        for kind, (_, goal) in KINDS.items()
    ]


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    title = f"Load {os.getloadavg()[0]:.1f}"
    table = new_table(title, ["executions"], ["median /s", "least", "most"])
    for kind in KINDS:
        cells = [f"{of_kind(rounds, kind, 'per_s', summary):.0f}" for summary in (statistics.median, min, max)]
        table.add_row(kind, *cells)
    show(table)


def main() -> None:
    arguments = parse_arguments(__doc__)
    counts = {"warm": 60, "cold": 6} if arguments.quick else {"warm": 600, "cold": 60}
    rounds = measure(arguments.rounds or (2 if arguments.quick else 5), counts)
    print_rounds(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "sandbox", rounds, targets)


if __name__ == "__main__":
    main()
