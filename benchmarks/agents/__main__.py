"""Costs of environments and agents: the gateway, a thousand attempts that wait for tools, the sandbox, workspaces,
and TRL.

make bench-env && python -m benchmarks.agents --json agents.json
"""

import asyncio
import statistics
from typing import Any

from benchmarks import sandbox
from benchmarks.agents import against_trl, gateway, waiting, workspaces
from benchmarks.agents.engine import engine
from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json


def main() -> None:
    arguments = parse_arguments(__doc__)
    against_trl.check()
    num_rounds = arguments.rounds or (1 if arguments.quick else 4)
    rows: list[dict[str, Any]] = []
    with engine() as one:
        rows += asyncio.run(gateway.rounds(one, num_rounds, 32 if arguments.quick else 128))
        rows += asyncio.run(waiting.rounds(one, max(1, num_rounds // 2), 100 if arguments.quick else 1000))
    targets: list[Target] = [*gateway.targets(rows, median), *waiting.targets(rows, median)]
    executions = sandbox.measure(num_rounds, {"warm": 60, "cold": 6} if arguments.quick else {"warm": 600, "cold": 60})
    rows += [{"part": "sandbox", "side": entry["kind"], "per_s": entry["per_s"]} for entry in executions]
    targets += sandbox.targets_of(executions)
    in_workspaces = asyncio.run(workspaces.rounds(num_rounds, arguments.quick))
    targets += workspaces.targets(in_workspaces)
    rows += against_trl.rounds(num_rounds, *((1, 60, 2) if arguments.quick else (6,)))
    targets += against_trl.targets(rows, median)
    table = new_table("Environments and agents", ["part", "side"], ["a second, median", "rounds"])
    for part, side in dict.fromkeys((row["part"], row["side"]) for row in rows):
        rates = [row["per_s"] for row in rows if (row["part"], row["side"]) == (part, side)]
        table.add_row(part, side, f"{statistics.median(rates):,.0f}", ", ".join(f"{rate:,.0f}" for rate in rates))
    show(table)
    against_trl.print_table(rows)
    print_targets(targets)
    write_json(arguments.json, "agents", [*rows, *in_workspaces], targets)


def median(rows: list[dict[str, Any]], side: str) -> float:
    return statistics.median(row["per_s"] for row in rows if row["side"] == side)


if __name__ == "__main__":
    main()
