"""Every reinforcement learning recipe on the arithmetic task: does it learn, from several seeds?

    python -m benchmarks.learning --json learning.json

Each seed has one warm start (`recipe=sft`), from which every recipe starts that has none of its own; recipes that want
further models make them once a seed as well. Accuracy is greedy, on held-out problems, before and after.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Target, new_table, parse_arguments, print_targets, show, write_json
from penstock.orchestrator.run_directory.run_directory import RunDirectory

RECIPES = (
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "remax", "gspo", "cispo", "ppo", "online_dpo", "dpo", "kto",
    "distill", "distill_topk", "self_distill",
)  # fmt: skip
OWN_START = ("self_distill",)
"""Recipes that have a warm start of their own."""
OTHERS = {"ppo": "reward_model", "distill": "teacher", "distill_topk": "teacher"}
"""Models that a recipe makes first, kept for the seed."""
NUM_SEEDS = 3
MARGIN = 0.05
"""Margin by which a recipe must beat its start, in accuracy."""
DEADLINE_S = 600


def penstock(words: list[str], log: Path, deadline_s: float = DEADLINE_S) -> float:
    """Run the command. Returns its seconds. Ends the benchmark if it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "penstock.cli.main", "run", *words]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=deadline_s, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise SystemExit(f"penstock run {' '.join(words)} failed; the end of its output:\n{tail}")
    return time.perf_counter() - start


def accuracies(directory: Path) -> list[float]:
    lines = RunDirectory(directory).read_metrics()
    return [line["accuracy/heldout"] for line in lines if line.get("accuracy/heldout") is not None]


def measure(recipe: str, seed: int, work: Path, steps: list[str]) -> dict[str, Any]:
    """Measure a recipe from the seed's warm start."""
    name = f"{recipe}-{seed}"
    words = [f"recipe={recipe}", f"seed={seed}", f"name={name}", f"output_dir={work}", *steps]
    if recipe not in OWN_START:
        words.append(f"model.path={work}/sft-{seed}/model")
    other = OTHERS.get(recipe)
    kept = work / f"{other}-{seed}"
    if other and kept.exists():
        words.append(f"model.paths.{other}={kept}")
    seconds = penstock(words, work / f"{name}.log")
    if other and not kept.exists():
        shutil.copytree(work / name / other / "model", kept)
    first, *_, last = accuracies(work / name)
    return {"recipe": recipe, "seed": seed, "start": first, "end": last, "seconds": seconds}


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("Held-out accuracy, greedy", ["recipe"], ["start", "end", "gain, worst seed", "seconds"])
    for recipe in dict.fromkeys(entry["recipe"] for entry in rounds):
        some = [entry for entry in rounds if entry["recipe"] == recipe]
        start, end, seconds = (statistics.median(entry[key] for entry in some) for key in ("start", "end", "seconds"))
        table.add_row(recipe, f"{start:.1%}", f"{end:.1%}", f"{worst_gain(some):+.1%}", f"{seconds:.0f}")
    show(table)


def worst_gain(entries: list[dict[str, Any]]) -> float:
    return float(min(entry["end"] - entry["start"] for entry in entries))


def main() -> None:
    arguments = parse_arguments(__doc__)
    recipes = RECIPES[:1] if arguments.quick else RECIPES
    num_seeds = 1 if arguments.quick else arguments.rounds or NUM_SEEDS
    steps = ["trainer.max_steps=5", "evaluation.every_steps=5"] if arguments.quick else []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        work = Path(folder)
        for seed in range(num_seeds):
            warm = ["trainer.max_steps=60"] if arguments.quick else []
            penstock(["recipe=sft", f"seed={seed}", f"name=sft-{seed}", f"output_dir={work}", *warm], work / "sft.log")
            for recipe in recipes:
                rounds.append(measure(recipe, seed, work, steps))
                print(rounds[-1], flush=True)
                write_json(arguments.json, "learning", rounds, [])  # an hour's work should outlive its last run
    print_rounds(rounds)
    by_recipe = {recipe: [entry for entry in rounds if entry["recipe"] == recipe] for recipe in recipes}
    targets = [Target(f"{name}: gain of the worst seed", worst_gain(some), "", ">=", MARGIN)
               for name, some in by_recipe.items()]  # fmt: skip
    print_targets(targets)
    write_json(arguments.json, "learning", rounds, targets)


if __name__ == "__main__":
    main()
