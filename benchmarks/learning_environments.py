"""Every recipe with an environment: does it learn, from several seeds, within ten minutes?

    python -m benchmarks.learning_environments --json learning_environments.json

Each run makes its own warm start. Accuracy is greedy, on held-out tasks, before and after; the seconds are those of the
command, warm start included.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.learning import MARGIN, NUM_SEEDS, penstock, worst_gain
from penstock.orchestrator.run_directory.run_directory import RunDirectory

MEASURES = {
    "tictactoe": ["accuracy/random", "heldout_reward/perfect"],
    "guess": ["accuracy/heldout"],
    "see_and_move": ["accuracy/heldout"],
    "tool_use": ["accuracy/heldout"],
    "code": ["accuracy/heldout"],
    "agent": ["accuracy/heldout"],
    "repair": ["accuracy/heldout"],
    "best_of_n": ["accuracy/heldout", "accuracy/best_of_8"],
    "parallel_answers": ["accuracy/heldout", "accuracy/alone"],
    "tree": ["accuracy/heldout"],
    "proposer": ["accuracy/heldout"],
    "tictactoe_two": [f"{player}/heldout_reward/heldout" for player in ("first", "second")],
}
"""Measures that are evaluated, by recipe. A perfect player cannot be beaten: its measure is the reward, 0.5 for a
draw."""
MAX_SECONDS = 600.0


def measure(recipe: str, seed: int, work: Path, steps: list[str]) -> list[dict[str, Any]]:
    name = f"{recipe}-{seed}"
    words = [f"recipe={recipe}", f"seed={seed}", f"name={name}", f"output_dir={work}", *steps]
    seconds = penstock(words, work / f"{name}.log", deadline_s=2 * MAX_SECONDS)
    lines = RunDirectory(work / name).read_metrics()
    found = []
    for key in MEASURES[recipe]:
        first, *_, last = [line[key] for line in lines if line.get(key) is not None]
        found.append({"recipe": recipe, "measure": key, "seed": seed, "start": first, "end": last, "seconds": seconds})
    return found


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("Held-out, greedy", ["recipe", "measure"], ["each seed", "gain, worst seed", "seconds"])
    for some in by_measure(rounds).values():
        seeds = ", ".join(f"{entry['start']:.1%} → {entry['end']:.1%}" for entry in some)
        seconds = statistics.median(entry["seconds"] for entry in some)
        table.add_row(some[0]["recipe"], some[0]["measure"], seeds, f"{worst_gain(some):+.1%}", f"{seconds:.0f}")
    show(table)


def by_measure(rounds: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in rounds:
        found.setdefault((entry["recipe"], entry["measure"]), []).append(entry)
    return found


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    gains = [Target(f"{recipe}, {key}: gain of the worst seed", worst_gain(some), "", ">=", MARGIN)
             for (recipe, key), some in by_measure(rounds).items()]  # fmt: skip
    slowest = max(entry["seconds"] for entry in rounds)
    return [*gains, Target("the slowest run", slowest, "s", "<=", MAX_SECONDS)]


def main() -> None:
    arguments = parse_arguments(__doc__)
    recipes = list(MEASURES)[:1] if arguments.quick else list(MEASURES)
    num_seeds = 1 if arguments.quick else arguments.rounds or NUM_SEEDS
    steps = ["trainer.max_steps=5", "evaluation.every_steps=5"] if arguments.quick else []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for seed in range(num_seeds):
            for recipe in recipes:
                rounds += measure(recipe, seed, Path(folder), steps)
                print(rounds[-1], flush=True)
                write_json(arguments.json, "learning_environments", rounds, [])  # should outlive the last run
    print_rounds(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "learning_environments", rounds, targets)


if __name__ == "__main__":
    main()
