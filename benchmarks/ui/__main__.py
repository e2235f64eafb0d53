"""The page over ten runs of 10,000 steps and a million samples, in a real browser; and the cost of recording for a run.

    python -m benchmarks.ui --json ui.json

*First paint*: from the navigation until all charts in view of a run's page are painted, by a `penstock ui` that has
just started and was asked nothing before (cold), and again (warm); the browser has nothing of it either time. *Filter*:
from the change of a field until the list of samples is painted anew, once all samples are in the server's index.
*Memory*: resident, after the page of every run was looked at. *Recording*: numbers, an event, the line of the timeline,
the state and the samples of a step of the demo, by the controller's own code, against the time of a step of the demo in
the same run of the benchmark.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import new_table, parse_arguments, print_targets, show, write_json
from benchmarks.ui import made, page, recording

SIZES = {"num_runs": 10, "num_steps": 10_000, "num_samples": 1_000_000}
QUICK = {"num_runs": 3, "num_steps": 500, "num_samples": 10_000}


def main() -> None:
    arguments = parse_arguments(__doc__)
    num_rounds = arguments.rounds or (1 if arguments.quick else 5)
    with tempfile.TemporaryDirectory(prefix="penstock-ui-") as folder:
        runs = Path(folder) / "runs"
        made.make_runs(runs, **(QUICK if arguments.quick else SIZES))
        shown = page.rounds(runs, num_rounds)
        recorded = recording.rounds(Path(folder), num_rounds)
    print_rows(shown, "The page", ["ms", "mib", "most_mib"])
    print_rows(recorded, "Recording", ["ms"])
    targets = [*page.targets(shown), *recording.targets(recorded)]
    print_targets(targets)
    write_json(arguments.json, "ui", [*shown, *recorded], targets, sizes=QUICK if arguments.quick else SIZES)


def print_rows(rows: list[dict[str, Any]], title: str, units: list[str]) -> None:
    table = new_table(title, ["part"], ["median", "unit", "rounds"])
    for part in dict.fromkeys(row["part"] for row in rows):
        for unit in units:
            values = [row[unit] for row in rows if row["part"] == part and unit in row]
            if values:
                told = ", ".join(f"{value:,.3g}" for value in values)
                table.add_row(part, f"{statistics.median(values):,.1f}", unit, told)
    show(table)


if __name__ == "__main__":
    main()
