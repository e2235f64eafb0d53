"""Problems of which half are out of reach: what do they cost, with a curriculum and without?

    python -m benchmarks.curriculum --json curriculum.json

`recipe=arithmetic data.options.max_terms=3`: sums of two numbers, which the model can learn, and of three, which it
cannot. Two groups a step, so that samples are what limits a step: with the recipe's 32 both sides need less than ten.
The learning rate is the recipe's for so small a batch, by the square root. Each seed has one warm start. Every fourth
step answers greedily to sums of two; a run ends when 90% of them are right.

    uniform, curriculum   a step trains two groups, whether they have an advantage or not
    … refilled            groups without an advantage are dropped, and others take their place: a step trains two that
                          have one. Its cost is then the number of groups that are sampled, not of steps
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.learning import penstock
from penstock.orchestrator.run_directory.run_directory import RunDirectory

CURRICULUM = ["data.curriculum.by=num_terms"]
REFILLED = [
    "algorithm=policy_gradient", "algorithm.advantage=grpo", "algorithm.group_size=8",
    "algorithm.drop_uniform_groups=true",
]  # fmt: skip
SIDES = {
    "uniform": [], "curriculum": CURRICULUM,
    "uniform, refilled": REFILLED, "curriculum, refilled": [*CURRICULUM, *REFILLED],
}  # fmt: skip
NUM_SEEDS = 8
"""Three seeds spread from 20 to 48 steps."""
GOAL, MAX_STEPS = 0.9, 100
GROUPS, GROUP_SIZE = 2, 8
RATE = 5.0e-4 * (GROUPS / 32) ** 0.5
WITHIN, HALF = 0.6, 0.5
PLAIN = "min_terms:2,max_terms:2,min_digits:2,max_digits:2,operators:['+'],allow_parentheses:false,allow_negation:false"


def measure(side: str, seed: int, work: Path, steps: int) -> dict[str, Any]:
    """Run one side from the seed's warm start."""
    name = f"{side.replace(', ', '-')}-{seed}"
    words = ["recipe=arithmetic", f"seed={seed}", f"data.seed={seed}", "data.options.max_terms=3", *SIDES[side]]
    words += [f"model.path={work}/sft-{seed}/model", f"name={name}", f"output_dir={work}"]
    words += [f"trainer.groups_per_step={GROUPS}", f"trainer.max_steps={steps}", f"trainer.optimizer.lr={RATE}"]
    words += ["evaluation.every_steps=4", f"evaluation.options={{{PLAIN}}}", f"evaluation.stop_at_accuracy={GOAL}"]
    seconds = penstock([*words, "tracking.samples_every_steps=1"], work / f"{name}.log")
    directory = RunDirectory(work / name)
    lines = directory.read_metrics()
    found = {line["step"]: line["accuracy/heldout"] for line in lines if line.get("accuracy/heldout") is not None}
    reached = min((step for step, accuracy in found.items() if accuracy >= GOAL), default=None)
    last = reached or steps
    dropped = max((line.get("dropped/no_signal", 0) for line in lines if line["step"] <= last), default=0) / GROUP_SIZE
    sampled = GROUPS * last + dropped
    flat = (dropped + GROUPS * sum(flat_groups(directory)[:last])) / sampled
    return {"side": side, "seed": seed, "steps": last, "reached": reached is not None, "best": max(found.values()),
            "groups": sampled, "flat": flat, "seconds": seconds}  # fmt: skip


def flat_groups(directory: RunDirectory) -> list[float]:
    """Share of the groups of each step that have no advantage, since all their rewards are the same."""
    from pyarrow import parquet

    shares = []
    for file in directory.sample_files():
        table = parquet.read_table(file, columns=["group_id", "reward"])
        groups, rewards = (table.column(name).to_numpy() for name in ("group_id", "reward"))
        shares.append(float(np.mean([np.ptp(rewards[groups == group]) == 0 for group in np.unique(groups)])))
    return shares


def print_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table(
        f"Cost of {GOAL:.0%} of sums of two", ["side"], ["steps, each seed", "groups sampled", "without advantage"]
    )
    for side in dict.fromkeys(entry["side"] for entry in rounds):
        some = [entry for entry in rounds if entry["side"] == side]
        steps = ", ".join(f"{entry['steps']}" if entry["reached"] else f"more ({entry['best']:.0%})" for entry in some)
        groups, flat = (statistics.fmean(entry[key] for entry in some) for key in ("groups", "flat"))
        table.add_row(side, steps, f"{groups:.0f}", f"{flat:.0%}")
    show(table)


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    """Ratios of a curriculum to uniform sampling. The last step counts for a run that does not reach the goal."""

    def ratio(key: str, kind: str = "") -> float:
        one, other = (
            statistics.fmean(entry[key] for entry in rounds if entry["side"] == f"{side}{kind}")
            for side in ("curriculum", "uniform")
        )
        return one / other

    return [
        Target(f"steps to {GOAL:.0%}, of uniform sampling's", ratio("steps"), "", "<=", WITHIN),
        Target("groups without advantage until then, of uniform sampling's", ratio("flat"), "", "<=", HALF),
        Target(f"refilled: groups sampled to {GOAL:.0%}, of uniform sampling's", ratio("groups", ", refilled"), "",
               "<=", WITHIN),
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
