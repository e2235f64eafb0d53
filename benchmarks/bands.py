"""The curves of recipes by several seeds, written beside them: the bands that runs of them are compared with.

    python -m benchmarks.bands --json bands.json                          # every recipe that learns on two cores
    python -m benchmarks.bands --sides grpo dpo --json bands.json         # some

Each recipe runs as it is, once a seed. Recipes that begin with the same warm start share it within a seed. Where a band
is written, it is the newest one: look at what changed before it is committed.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.learning import MARGIN, NUM_SEEDS, RECIPES, accuracies, penstock, worst_gain
from benchmarks.learning_environments import MEASURES
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.charts.known_curves import write_known

SIDES = ("arithmetic", "custom_algorithm", *RECIPES, "moe", *MEASURES, "count_shapes")
DEADLINE_S = 3600.0
"""Deadline of a run with its warm start, whatever else the machine does."""


def measure(recipe: str, seed: int, work: Path, words: list[str]) -> dict[str, Any]:
    """Run a recipe once. Its warm start is kept for other recipes of the seed."""
    name, warm = f"{recipe}-{seed}", load_config([f"recipe={recipe}"]).warm_start.recipe
    kept, own = work / f"{warm}-{seed}", work / name / "warm_start"
    if warm is not None and kept.exists():
        shutil.copytree(kept, own)
    words = [f"recipe={recipe}", f"seed={seed}", f"name={name}", f"output_dir={work}", "resume=auto", *words]
    seconds = penstock(words, work / f"{name}.log", DEADLINE_S)
    if warm is not None and not kept.exists():
        shutil.copytree(own, kept)
    first, *_, last = accuracies(work / name)
    return {"recipe": recipe, "seed": seed, "start": first, "end": last, "seconds": seconds}


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("Held-out accuracy, greedy", ["recipe"], ["each seed", "gain, worst seed"])
    for recipe in dict.fromkeys(entry["recipe"] for entry in rounds):
        some = [entry for entry in rounds if entry["recipe"] == recipe]
        seeds = ", ".join(f"{entry['start']:.1%} → {entry['end']:.1%}" for entry in some)
        table.add_row(recipe, seeds, f"{worst_gain(some):+.1%}")
    show(table)


def main() -> None:
    arguments = parse_arguments(__doc__, SIDES)
    recipes = arguments.sides or (SIDES[1:2] if arguments.quick else SIDES)
    seeds = range(1, 1 + (1 if arguments.quick else arguments.rounds or NUM_SEEDS))
    words = ["trainer.max_steps=2", "warm_start.overrides=[trainer.max_steps=10]"] if arguments.quick else []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for recipe in recipes:
            for seed in seeds:
                rounds.append(measure(recipe, seed, Path(folder), words))
                print(rounds[-1], flush=True)
                write_json(arguments.json, "bands", rounds, [])  # should outlive the last run
            if not arguments.quick:
                print(write_known([f"{folder}/{recipe}-{seed}" for seed in seeds]), flush=True)
    print_rounds(rounds)
    targets = [
        Target(f"{recipe}: gain of the worst seed", worst_gain([one for one in rounds if one["recipe"] == recipe]), "",
               ">=", MARGIN)
        for recipe in recipes
    ]  # fmt: skip
    print_targets(targets)
    write_json(arguments.json, "bands", rounds, targets)


if __name__ == "__main__":
    main()
