"""What a simulated run of 1,024 engines costs: CPU seconds and memory of one process.

Each case is a process of its own. CPU seconds are told beside those of the wall, since the simulator has one thread and
other work on the machine does not change them much.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.harness import ROOT, Target, new_table, show

STEPS, GROUPS, SIZE, ENGINES, RANKS = 1000, 256, 8, 1024, 64
CASES = (0, 1, 4)
"""Bounds of staleness. With 0 all engines begin together, with 4 they are full across steps."""
QUICK_STEPS, QUICK_ENGINES = 10, 128
LONGEST_S = 3600.0
"""Deadline of one process, in seconds."""
MOST_S, MOST_MIB = 120.0, 2048.0


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    """Simulate each case so many times (default: once)."""
    steps, engines = (QUICK_STEPS, QUICK_ENGINES) if quick else (STEPS, ENGINES)
    return [_simulated(bound, steps, engines) for bound in CASES for _ in range(num_rounds or 1)]


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    what = f"{rounds[0]['engines']:,} engines, {rounds[0]['steps']:,} steps of {GROUPS} groups x {SIZE}"
    return [
        Target(f"{what}: CPU of the longest", max(one["cpu_s"] for one in rounds), "s", "<=", MOST_S),
        Target(f"{what}: memory of the largest", max(one["peak_mib"] for one in rounds), "MiB", "<=", MOST_MIB),
    ]


def show_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table(
        f"{rounds[0]['engines']:,} engines, {RANKS} ranks, {rounds[0]['steps']:,} steps of {GROUPS} groups x {SIZE}",
        ["max_staleness"], ["CPU s", "wall s", "ms a step", "events", "peak MiB", "simulated h"],
    )  # fmt: skip
    for one in rounds:
        table.add_row(
            str(one["max_staleness"]), f"{one['cpu_s']:.1f}", f"{one['wall_s']:.1f}",
            f"{1000 * one['cpu_s'] / one['steps']:.0f}", f"{one['events']:,}", f"{one['peak_mib']:.0f}",
            f"{one['simulated_s'] / 3600:.1f}",
        )  # fmt: skip
    show(table)


def _simulated(bound: int, steps: int, engines: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planner.scale", *map(str, (bound, steps, engines))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    from penstock.orchestrator.configuration.compose import load_config
    from penstock.planner.durations import ConstantDurations, SyncSeconds
    from penstock.planner.lengths import Lengths
    from penstock.planner.simulation.simulated_members import SimulatedSamples
    from penstock.planner.simulation.simulation import Simulation

    bound, steps, engines = map(int, sys.argv[1:])
    config = load_config(
        [
            "recipe=arithmetic", f"max_staleness={bound}", f"algorithm.group_size={SIZE}",
            f"trainer.groups_per_step={GROUPS}", f"trainer.max_steps={steps}", f"trainer.num_ranks={RANKS}",
            f"rollout.num_workers={engines}", "rollout.max_concurrent_samples=256", "rollout.max_model_len=8192",
            "rollout.sampling.max_tokens=4096",
        ]
    )  # fmt: skip
    durations = ConstantDurations(
        decode={1: 0.0062, 32: 0.0096, 128: 0.0179, 256: 0.0302}, update_tokens_per_s=20_000,
        synced=SyncSeconds(2.0, 0.5, 0.5), stages={"reward": 0.001},
    )  # fmt: skip
    lengths = Lengths.lognormal(1100, 4096, 0.8)
    simulation = Simulation(config, durations, SimulatedSamples(partial(lengths.of, seed=0)))
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    found = simulation.run()
    print(
        json.dumps(
            {
                "max_staleness": bound, "steps": steps, "engines": engines, "cpu_s": time.process_time() - cpu_s,
                "wall_s": time.perf_counter() - wall_s, "events": found.num_events,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "simulated_s": found.seconds,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
