"""Problems of which half are out of reach: how many steps do they cost, with a curriculum, with replay, and without?

    python -m benchmarks.curriculum --json curriculum.json

`recipe=arithmetic data.options.max_terms=3`: sums of two numbers, which the model can learn, and of three, which it
cannot. Two groups a step, so that samples are what limits a step: with the recipe's 32 both sides need less than ten.
The learning rate is the recipe's for so small a batch, by the square root. Each seed has one warm start. Both sides
then take the same steps on the same data, and are measured every fourth step by greedy answers to sums of two.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.learning import NUM_SEEDS, penstock
from penstock.orchestrator.run_directory.run_directory import RunDirectory

CURRICULUM = ["data.curriculum.by=num_terms"]
REPLAY = ["max_staleness=2", "trainer.replay.share=0.5", "trainer.replay.steps=2"]
"""Settings by which prompts are admitted as with max_staleness=0: what is staler is trained again."""
SIDES = {"uniform": [], "curriculum": CURRICULUM, "curriculum and replay": [*CURRICULUM, *REPLAY]}
GOAL, MAX_STEPS = 0.9, 100
RATE = 5.0e-4 * (2 / 32) ** 0.5
WITHIN, HALF = 0.6, 0.5
PLAIN = "min_terms:2,max_terms:2,min_digits:2,max_digits:2,operators:['+'],allow_parentheses:false,allow_negation:false"


def measure(side: str, seed: int, work: Path, steps: int) -> dict[str, Any]:
    """Run one side from the seed's warm start."""
    name = f"{side.replace(' ', '-')}-{seed}"
    words = ["recipe=arithmetic", f"seed={seed}", f"data.seed={seed}", "data.options.max_terms=3", *SIDES[side]]
    words += [f"model.path={work}/sft-{seed}/model", f"name={name}", f"output_dir={work}", "trainer.groups_per_step=2"]
    words += [f"trainer.max_steps={steps}", "evaluation.every_steps=4", "evaluation.num_problems=16"]
    words += [f"trainer.optimizer.lr={RATE}"]
    words += [f"evaluation.sets={{two:{{num_problems:256,options:{{{PLAIN}}}}}}}", "tracking.samples_every_steps=1"]
    seconds = penstock(words, work / f"{name}.log")
    directory = RunDirectory(work / name)
    lines = directory.read_metrics()
    found = {line["step"]: line["accuracy/two"] for line in lines if line.get("accuracy/two") is not None}
    reached = min((step for step, accuracy in found.items() if accuracy >= GOAL), default=None)
    flat = flat_groups(directory)[: reached or steps]
    return {"side": side, "seed": seed, "steps": reached or steps, "reached": reached is not None,
            "best": max(found.values()), "flat": statistics.fmean(flat), "seconds": seconds}  # fmt: skip


def flat_groups(directory: RunDirectory) -> list[float]:
    """Share of the groups of each step that have no advantage, since all their rewards are the same."""
    from pyarrow import parquet

    shares = []
    for file in directory.sample_files():
        table = parquet.read_table(file, columns=["group_id", "reward"])
        groups, rewards = (table.column(name).to_numpy() for name in ("group_id", "reward"))
        shares.append(float(np.mean([np.ptp(rewards[groups == group]) == 0 for group in np.unique(groups)])))
    return shares


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table(f"Steps to {GOAL:.0%} of sums of two", ["side"], ["each seed", "groups without advantage"])
    for side in SIDES:
        some = [entry for entry in rounds if entry["side"] == side]
        steps = ", ".join(f"{entry['steps']}" if entry["reached"] else f"more ({entry['best']:.0%})" for entry in some)
        table.add_row(side, steps, f"{statistics.fmean(entry['flat'] for entry in some):.0%}")
    show(table)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    """Ratios of each other side to uniform sampling. The last step counts for a side that does not reach the goal."""
    steps, flat = ({side: statistics.fmean(entry[key] for entry in rounds if entry["side"] == side) for side in SIDES}
                   for key in ("steps", "flat"))  # fmt: skip
    plain, *others = SIDES
    return [
        target
        for side in others
        for target in (
            Target(f"{side}: steps to {GOAL:.0%}, of uniform sampling's", steps[side] / steps[plain], "", "<=", WITHIN),
            Target(f"{side}: groups without advantage until then, of uniform sampling's", flat[side] / flat[plain], "",
                   "<=", HALF),
        )
    ]  # fmt: skip


def main() -> None:
    arguments = parse_arguments(__doc__)
    num_seeds = 1 if arguments.quick else arguments.rounds or NUM_SEEDS
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        work = Path(folder)
        for seed in range(1, num_seeds + 1):
            warm = ["trainer.max_steps=60"] if arguments.quick else []
            words = ["recipe=arithmetic_sft", f"seed={seed}", f"name=sft-{seed}", f"output_dir={work}", *warm]
            penstock(words, work / "sft.log")
            for side in SIDES:
                rounds.append(measure(side, seed, work, 4 if arguments.quick else MAX_STEPS))
                print(rounds[-1], flush=True)
    print_rounds(rounds)
    targets = targets_of(rounds)
    print_targets(targets)
    write_json(arguments.json, "curriculum", rounds, targets)


if __name__ == "__main__":
    main()
