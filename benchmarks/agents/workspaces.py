"""Costs of workspaces: commands a second beside the sandbox's executions, forks of a large tree, and idle workspaces.

    .venv/bin/python -m benchmarks.agents.workspaces --json FILE

"fork": of a tree of 200 MB in which a file was changed, one after the other; "eight forks": the time until eight that
are asked for at once stand, as samples of a group are. A fence stands by for the next fork, and the others are started.
"idle": private memory of all processes of resting workspaces, and of the pages that they share, their part. Commands
are `:`, in as many workspaces as cores, beside the executions of `benchmarks.sandbox`, alternating.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.sandbox import executed
from penstock.workers.sandbox.cgroup import descendants
from penstock.workers.sandbox.execution import ProgramOutcome
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.sandbox.workspace import Workspaces

FILES, FILE_BYTES = 2000, 100_000
NUM_IDLE = 100
STANDS_S = 1.0
"""Seconds between forks, as between the ends of two answers of a model: the next fence stands by then."""


def make_tree(base: str) -> Path:
    """A tree of 200 MB."""
    tree = Path(base) / "tree"
    for number in range(FILES):
        directory = tree / f"package{number % 50}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"file{number}").write_bytes(os.urandom(FILE_BYTES))
    return tree


async def forks(workspaces: Workspaces, tree: Path, num_rounds: int) -> list[dict[str, Any]]:
    rows = []
    async with workspaces.open(tree) as ws:
        await ws.run("echo changed >> package0/file0; mkdir new; echo new > new/file")
        for _ in range(num_rounds):
            await asyncio.sleep(STANDS_S)
            began = time.perf_counter()
            fork = await ws.fork()
            rows.append({"part": "fork", "seconds": time.perf_counter() - began})
            assert (await fork.run("tail -c 8 package0/file0; cat new/file")).stdout.endswith("new\n")
            fork.close()
        await asyncio.sleep(STANDS_S)
        began = time.perf_counter()
        group = await asyncio.gather(*(ws.fork() for _ in range(8)))
        rows.append({"part": "eight forks", "seconds": time.perf_counter() - began})
        for fork in group:
            fork.close()
    return rows


async def idle(workspaces: Workspaces, tree: Path, count: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(workspaces.open(tree)) for _ in range(count)]
        for ws in opened:
            await ws.run("echo changed >> package0/file0")
            ws.worker.rest()
        await asyncio.sleep(STANDS_S)
        processes = [pid for ws in opened for pid in (ws.worker.process.pid, *descendants(ws.worker.process.pid))]
        return {"part": "idle", "count": count, "mib": sum(map(pss_bytes, processes)) / 2**20}


def pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


async def commands(workspaces: Workspaces, tree: Path, num_rounds: int, count: int) -> list[dict[str, Any]]:
    cores, rows = os.cpu_count() or 1, []
    async with AsyncExitStack() as stack, Sandbox(num_workers=cores) as sandbox:
        opened = [await stack.enter_async_context(workspaces.open(tree)) for _ in range(cores)]
        sides: dict[str, Callable[[int], Awaitable[Any]]] = {
            "sandbox": lambda core: executed(sandbox, 1), "workspace": lambda core: succeeded(opened[core].run(":")),
        }  # fmt: skip
        for number in range(num_rounds + 1):
            for side, call in sides.items():
                began = time.perf_counter()
                await asyncio.gather(*(repeated(call, core, count // cores) for core in range(cores)))
                if number:  # the first round starts what is started late
                    rows.append({"part": "commands", "side": side, "per_s": count / (time.perf_counter() - began)})
    return rows


async def repeated(call: Callable[[int], Awaitable[Any]], core: int, count: int) -> None:
    for _ in range(count):
        await call(core)


async def succeeded(command: Awaitable[ProgramOutcome]) -> None:
    assert (await command).is_success


async def rounds(num_rounds: int, quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as base:
        tree, workspaces = make_tree(base), Workspaces()
        try:
            rows = await commands(workspaces, tree, num_rounds, 60 if quick else 400)
            rows += await forks(workspaces, tree, 3 if quick else 20)
            rows.append(await idle(workspaces, tree, 10 if quick else NUM_IDLE))
        finally:
            await workspaces.close()
    return rows


def of(rows: list[dict[str, Any]], part: str, what: str, side: str = "") -> float:
    return statistics.median(row[what] for row in rows if row["part"] == part and row.get("side", "") == side)


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    ratio = of(rows, "commands", "per_s", "workspace") / of(rows, "commands", "per_s", "sandbox")
    (resting,) = (row for row in rows if row["part"] == "idle")
    return [
        Target("commands a second, of the sandbox's", ratio, "x", ">=", 0.8),
        Target("fork of a tree of 200 MB", 1000 * of(rows, "fork", "seconds"), "ms", "<=", 50.0),
        Target(
            f"memory of {NUM_IDLE} idle workspaces", resting["mib"] * NUM_IDLE / resting["count"], "MiB", "<=", 2048.0
        ),
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    rows = asyncio.run(rounds(arguments.rounds or (2 if arguments.quick else 5), arguments.quick))
    table = new_table(f"Workspaces, load {os.getloadavg()[0]:.1f}", ["what"], ["median"])
    for side in ("sandbox", "workspace"):
        table.add_row(f"{side}: commands a second", f"{of(rows, 'commands', 'per_s', side):.0f}")
    for part in ("fork", "eight forks"):
        table.add_row(part, f"{1000 * of(rows, part, 'seconds'):.0f} ms")
    show(table)
    print_targets(targets(rows))
    write_json(arguments.json, "workspaces", rows, targets(rows))


if __name__ == "__main__":
    main()
