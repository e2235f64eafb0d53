"""Samples a second of training with a tool, in several turns: Penstock (max_staleness 0 and 1) against TRL's
environments, alternating on the same cores.

Both sides have the same model, which has learned before to call the tool (`sums.py`), the same problems, 8 prompts x 8
attempts a step, the same limit of sampled tokens, and make an optimizer step of each batch. The learning rate is next
to nothing, so that turns and tokens of an attempt stay the same, and are reported of every side.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.agents import sums
from benchmarks.end_to_end import ENVIRONMENT, PENSTOCK_SETTINGS, STALENESS, TRL_PYTHON, WORKLOADS
from benchmarks.harness import Child, Target, new_table, show
from benchmarks.learning import penstock

Row = dict[str, Any]
PART = "trl"
SIDES = ("trl", "sync", "async")
NUM_PROBLEMS = 512
PROMPTS_PER_STEP = 8
NUM_LESSONS = 200
"""Number of steps of the supervised training."""
SHARE_GROWING = 0.75
"""Share of the steps in which the turns that are shown grow to their full length."""
NUM_DEMONSTRATIONS = 48
"""Number of turns in each step."""
MAX_TOKENS = 512
"""Most tokens of an attempt: about four times as many as there are in most."""
TARGETS = {"async": 2.0, "sync": 1.3}


def check() -> None:
    """End the benchmark, before it has begun, where TRL is not there."""
    if not TRL_PYTHON.exists():
        raise SystemExit("There is no .venv-trl: run `make bench-env` first.")


def rounds(
    num_rounds: int, num_steps: int, num_lessons: int = NUM_LESSONS, prompts_per_step: int = PROMPTS_PER_STEP
) -> list[Row]:
    """Measure. `num_steps`: measured ones of a round. `num_lessons`: steps in which the model learns to call the
    tool."""
    check()
    found = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        work = Path(folder)
        sums.write_problems(work / "problems.jsonl", NUM_PROBLEMS)
        sides = start_sides(work, teach(work, num_lessons), prompts_per_step)
        try:
            for child in sides.values():
                child.ready()
            for child in sides.values():  # first rounds are slower
                child.round(1)
            for number in range(num_rounds):
                for side, child in sides.items():
                    if side == "trl":
                        child.round(WORKLOADS["fixed"].settle_steps)
                    found.append(row(side, number, child.round(num_steps)))
                    print(f"trl {side}: {found[-1]['per_s']:.1f} samples/s", flush=True)
        finally:
            for child in sides.values():
                child.close()
    return found


def teach(work: Path, num_lessons: int) -> Path:
    """Make the model that all sides start from: a new one after Penstock's own supervised training."""
    sums.build_model(work / "untaught")
    file = work / "demonstrations.jsonl"
    num_rows = num_lessons * NUM_DEMONSTRATIONS
    sums.write_demonstrations(file, num_rows, int(SHARE_GROWING * num_rows))
    words = [
        "name=taught", f"output_dir={work}", f"model.path={work / 'untaught'}", "algorithm=sft",
        "data.source=jsonl", f"data.path={file}", "data.shuffle=false",
        "data.columns.prompt=messages", "data.columns.answer=null", "data.columns.response=said",
        f"trainer.max_steps={num_lessons}", f"trainer.groups_per_step={NUM_DEMONSTRATIONS}",
        "trainer.optimizer.lr=2e-3", f"trainer.optimizer.warmup_steps={num_lessons // 20}",
        "trainer.optimizer.schedule=cosine", "trainer.optimizer.betas=[0.9,0.98]", "tracking.samples_every_steps=0",
    ]  # fmt: skip
    seconds = penstock(words, work / "taught.log")
    print(f"trl: the model has learned for {seconds:.0f} s", flush=True)
    return work / "taught" / "model"


def start_sides(work: Path, model: Path, prompts_per_step: int) -> dict[str, Child]:
    common = ["--model", str(model), "--prompts", str(work / "problems.jsonl"), "--max-new-tokens", str(MAX_TOKENS)]
    common += ["--prompts-per-step", str(prompts_per_step)]
    sides = {"trl": Child("TRL", "trl_tools", work / "trl.log", common, TRL_PYTHON, environment=ENVIRONMENT)}
    for name in ("sync", "async"):
        more = ["--max-staleness", str(STALENESS[name]), "--output-dir", str(work / f"runs_{name}")]
        words = [*common, *more, *PENSTOCK_SETTINGS[name]]
        sides[name] = Child(f"Penstock {name}", "penstock_tools", work / f"{name}.log", words, environment=ENVIRONMENT)
    return sides


def row(side: str, number: int, answer: Row) -> Row:
    """The row of a round. `turns` and `tokens` are those of an attempt, in the mean; tokens are sampled ones."""
    samples = answer["samples"]
    return {
        "part": PART,
        "side": side,
        "round": number,
        "per_s": samples / answer["seconds"],
        "turns": answer["turns"] / samples,
        "tokens": answer["tokens"] / samples,
        "reward": answer["reward_mean"],
        **{name: answer[name] for name in ("samples", "seconds", "step_seconds", "phases") if name in answer},
    }


def print_table(rows: Sequence[Row]) -> None:
    """Print what the sides had to do, and so whether they may be compared; and Penstock's phases."""
    mine = [entry for entry in rows if entry["part"] == PART]
    table = new_table(
        "Sums with a tool: medians over rounds",
        ["side"],
        ["samples/s", "turns an attempt", "tokens an attempt", "reward", "tokens/s", "ms a step, by phase"],
    )
    for side in dict.fromkeys(entry["side"] for entry in mine):
        of_side = [entry for entry in mine if entry["side"] == side]
        rate, turns, tokens, reward = (
            statistics.median(entry[key] for entry in of_side) for key in ("per_s", "turns", "tokens", "reward")
        )
        figures = f"{rate:.1f}", f"{turns:.2f}", f"{tokens:.0f}", f"{reward:.2f}", f"{rate * tokens:.0f}"
        table.add_row(side, *figures, phases(of_side))
    show(table, 150)


def phases(rows: Sequence[Row]) -> str:
    """Medians over steps; empty for a side that does not say."""
    names = rows[0].get("phases", {})
    medians = {name: statistics.median(value for entry in rows for value in entry["phases"][name]) for name in names}
    return " ".join(f"{name} {1000 * value:.0f}" for name, value in medians.items())


def targets(rows: list[Row], median: Callable[[list[Row], str], float]) -> list[Target]:
    return [
        Target(f"samples/s with a tool, {side}, over TRL's", median(rows, side) / median(rows, "trl"), "x", ">=", goal)
        for side, goal in TARGETS.items()
    ]
