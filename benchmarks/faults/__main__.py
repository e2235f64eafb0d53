"""Costs of deaths: seconds until a run goes on, the time that is left for training, and the engines that are left.

    python -m benchmarks.faults --json faults.json

Runs of the demo's recipe on a Ray cluster of this machine, whose processes start as users' do. Members are ended by
SIGKILL. Each part has a file of its own: `measure`, `show_rounds` and `targets_of`.
"""

import tempfile
from pathlib import Path
from types import ModuleType

from benchmarks.faults import elastic, others, recovery
from benchmarks.faults.runs import Runs
from benchmarks.harness import parse_arguments, print_targets, write_json

PARTS: dict[str, ModuleType] = {"recovery": recovery, "others": others, "elastic": elastic}


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds, targets = [], []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, Runs.on_a_cluster(Path(folder)) as runs:
        for name, part in PARTS.items():
            measured = part.measure(runs, arguments.quick, arguments.rounds)
            part.show_rounds(measured)
            targets += part.targets_of(measured)
            rounds += [{"part": name, **one} for one in measured]
    print_targets(targets)
    write_json(arguments.json, "faults", rounds, targets)


if __name__ == "__main__":
    main()
