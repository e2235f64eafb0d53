"""Weights, rows and calls between machines, measured on links of a stated rate.

    python -m benchmarks.machines --json machines.json

Machines are namespaces of this one (`tests/machines/`), joined by a switch; their rates are such that links, and not
the cores that all of them share, are what is measured. Needs root. Each part has a file of its own: `measure`, `show`
and `targets_of`.
"""

from types import ModuleType

from benchmarks.harness import parse_arguments, print_targets, write_json
from benchmarks.machines import calls, changes, rows, weights

PARTS: dict[str, ModuleType] = {"weights": weights, "changes": changes, "rows": rows, "calls": calls}


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds, targets = [], []
    for name, part in PARTS.items():
        measured = part.measure(arguments.quick, arguments.rounds)
        part.show_rounds(measured)
        targets += part.targets_of(measured)
        rounds += [{"part": name, **one} for one in measured]
    print_targets(targets)
    write_json(arguments.json, "machines", rounds, targets)


if __name__ == "__main__":
    main()
