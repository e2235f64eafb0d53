"""Costs of the controller with 1,024 engines and 64 ranks.

    python -m benchmarks.controller --json controller.json

Rounds of 100 steps, a longer one for memory, and what Ray's calls cost. Each is a process of its own. A run's seconds
pass faster than the wall's (`clock.py`), CPU seconds do not: a step of 30 s costs the controller what it costs.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import ROOT, Target, new_table, parse_arguments, print_targets, show, write_json

ROUNDS, STEPS, LONG_STEPS = 3, 100, 1000
LONG = {"group_size": 2, "speed": 12.0}
"""Settings of the long run. Half the rows: what grows with the steps does not depend on them."""
QUICK = {"num_engines": 64, "num_ranks": 8, "num_rewards": 4, "speed": 60.0}
LONGEST_S = 4 * 3600.0
"""Deadline of one run, in seconds."""
SHARE, GROWTH_MIB = 0.01, 5.0
STEP_S = 30.0


def asked(module: str, *words: str) -> dict[str, Any]:
    """Run a module. Returns the line of JSON that its process prints."""
    command = [sys.executable, "-m", f"benchmarks.controller.{module}", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(num_rounds: int, quick: bool) -> list[dict[str, Any]]:
    scale: dict[str, Any] = {**QUICK, "num_steps": 6} if quick else {"num_steps": STEPS}
    long: dict[str, Any] = {**LONG, **QUICK, "num_steps": 20} if quick else {**LONG, "num_steps": LONG_STEPS}
    rounds = [{"part": "steps", **asked("run", json.dumps(scale))} for _ in range(num_rounds)]
    rounds.append({"part": "memory", **asked("run", json.dumps(long))})
    rounds += [{"part": "ray", **asked("ray_calls")} for _ in range(num_rounds)]
    return rounds


def of_part(rounds: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [one for one in rounds if one["part"] == part]


def middle(rounds: Sequence[dict[str, Any]], part: str, key: str) -> float:
    return statistics.median(one[key] for one in of_part(rounds, part))


def with_ray_ms(rounds: Sequence[dict[str, Any]]) -> float:
    """CPU milliseconds of a step: the controller's, and Ray's for as many calls."""
    calls, call_us = middle(rounds, "steps", "num_calls"), middle(rounds, "ray", "call_us")
    return middle(rounds, "steps", "cpu_ms") + calls * call_us / 1000


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    return [
        Target("the controller's own CPU, of a run's time", 100 * middle(rounds, "steps", "share"), "%", "<=",
               100 * SHARE),
        Target("memory of its process, gained in the second half of the long run",
               middle(rounds, "memory", "grown_mib"), "MiB", "<=", GROWTH_MIB),
    ]  # fmt: skip


def show_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    first = of_part(rounds, "steps")[0]
    table = new_table(
        f"{first['num_engines']:,} engines and {first['num_ranks']} ranks, {first['num_steps']} steps",
        ["round"], ["s a step", "controller, CPU ms a step", "of the time", "its thread, ms", "calls a step",
                    "store, CPU ms a step", "grown MiB"],
    )  # fmt: skip
    for number, one in enumerate([*of_part(rounds, "steps"), *of_part(rounds, "memory")]):
        title = str(number + 1) if one["part"] == "steps" else f"{one['num_steps']:,} steps"
        table.add_row(
            title, f"{one['step_s']:.1f}", f"{one['cpu_ms']:.0f}", f"{one['share']:.2%}", f"{one['thread_ms']:.0f}",
            f"{one['num_calls']:,.0f}", f"{one['store_cpu_ms']:,.0f}", f"{one['grown_mib']:.1f}",
        )  # fmt: skip
    show(table, width=120)
    total_ms, call_us = with_ray_ms(rounds), middle(rounds, "ray", "call_us")
    print(
        f"A call of a Ray actor costs its caller {call_us:.0f} µs of CPU, in Ray's threads too. With as many calls the "
        f"driver's process has {total_ms:,.0f} ms a step, {total_ms / (10 * STEP_S):.1f}% of {STEP_S:g} s."
    )


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds = measure(arguments.rounds or (1 if arguments.quick else ROUNDS), arguments.quick)
    show_rounds(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "controller", rounds, targets, with_ray_ms=with_ray_ms(rounds))


if __name__ == "__main__":
    main()
