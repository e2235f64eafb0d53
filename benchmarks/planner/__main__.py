"""The planner and the simulator: what they cost, and how far they are right.

    python -m benchmarks.planner --json planner.json
    python -m benchmarks.planner --sides scale

Each side is a module of this package, with bars that were written down before anything was measured.
"""

import importlib
from typing import Any

from benchmarks.harness import parse_arguments, print_targets, write_json

SIDES = ("scale", "choice", "uneven", "published", "gains", "memory", "reality")


def main() -> None:
    arguments = parse_arguments(__doc__, SIDES)
    rounds: list[dict[str, Any]] = []
    targets = []
    for name in arguments.sides or SIDES:
        side = importlib.import_module(f"benchmarks.planner.{name}")
        found = [{"part": name, **one} for one in side.measure(arguments.quick, arguments.rounds)]
        side.show_rounds(found)
        targets += side.targets_of(found)
        rounds += found
    print_targets(targets)
    write_json(arguments.json, "planner", rounds, targets)


if __name__ == "__main__":
    main()
