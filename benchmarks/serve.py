"""Loops through the SDK `tinker` against a server, over the same loop in `penstock run`, and many adapters over one.

    python -m benchmarks.serve --json serve.json

GRPO on a fresh model (4 layers, hidden 256, fp32) with adapters of rank 8: 8 prompts x 8 samples a step, at most 32 new
tokens, one engine (vLLM) and one rank. All sides run on the same cores; the processor time of the clients is in their
figures, since they run on them, too.

    run      penstock run, max_staleness=0, trainer.lora.publish=adapter
    sdk      one loop through the SDK
    two      two loops at the same time, each with an adapter of its own, tenants that know nothing of each other
    sixteen  sixteen loops

`one thread`: engine and rank have one thread each, so that one can compute beside the other. Medians over rounds, in
brackets the lowest and the highest; ratios are of the same round.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.end_to_end import ENVIRONMENT, write_prompts
from benchmarks.harness import Child, Target, new_table, parse_arguments, print_targets, show, spread, write_json
from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import build_fresh_model

RANK = 8
MAX_NEW_TOKENS = 32
NUM_ROUNDS = 3
STEPS = 6
"""Measured steps of each loop and round; loops that are many make fewer, and the same number of samples."""
ONE_THREAD = ["rollout.num_threads=1", "trainer.num_threads=1"]
ENGINE = ["rollout.enforce_eager=true", "rollout.kv_cache_gib=0.5", "rollout.max_model_len=128"]
LOOPS = {"sdk": (1, STEPS), "two": (2, STEPS), "sixteen": (16, 2)}
"""Loops at the same time and steps of each, by side."""
Round = dict[str, Any]


def start_sides(work: Path) -> dict[str, Child]:
    common = ["--model", str(work / "model"), "--prompts", str(work / "prompts.jsonl")]
    common += ["--max-new-tokens", str(MAX_NEW_TOKENS)]
    adapter = [f"trainer.lora.rank={RANK}", "trainer.lora.publish=adapter"]
    run = ["--workload", "long_tailed", "--output-dir", str(work / "runs"), *ENGINE, *adapter]
    served = ["--rank", str(RANK), *ENGINE, f"serve.max_rank={RANK}"]
    python = Path(sys.executable)
    return {
        "run": Child("run", "penstock_grpo", work / "run.log", [*common, *run], python, environment=ENVIRONMENT),
        "sdk": Child(
            "sdk", "sdk_loops", work / "sdk.log",
            [*common, "--output-dir", str(work / "served"), *served], python, environment=ENVIRONMENT,
        ),
        "one thread": Child(
            "one thread", "sdk_loops", work / "one_thread.log",
            [*common, "--output-dir", str(work / "one_thread"), *served, *ONE_THREAD], python, environment=ENVIRONMENT,
        ),
    }  # fmt: skip


def measure(work: Path, num_rounds: int) -> list[Round]:
    sides = start_sides(work)
    rounds: list[Round] = []

    def note(number: int, side: str, answer: dict[str, Any]) -> None:
        rounds.append({"round": number, "side": side, **answer})
        rate = answer["tokens"] / answer["seconds"]
        print(f"{side}: {answer['samples'] / answer['seconds']:.1f} samples/s, {rate:.0f} tokens/s", flush=True)

    try:
        for child in sides.values():
            child.ready()
        for name, child in sides.items():  # not measured: first rounds are slower
            child.ask({"steps": 2, "clients": 16 if name == "sdk" else 2})
        for number in range(num_rounds):
            note(number, "run", sides["run"].round(STEPS))
            for side in ("sdk", "sixteen"):
                clients, steps = LOOPS[side]
                note(number, side, sides["sdk"].ask({"steps": steps, "clients": clients}))
            for side, name in (("one, one thread each", "sdk"), ("two, one thread each", "two")):
                clients, steps = LOOPS[name]
                note(number, side, sides["one thread"].ask({"steps": steps, "clients": clients}))
    finally:
        for child in sides.values():
            child.close()
    return rounds


def rates(rounds: list[Round], side: str, unit: str) -> list[float]:
    return [entry[unit] / entry["seconds"] for entry in rounds if entry["side"] == side]


def ratios(rounds: list[Round], side: str, over: str, unit: str) -> list[float]:
    """Ratios of rates of the same round."""
    pairs = zip(rates(rounds, side, unit), rates(rounds, over, unit), strict=True)
    return [one / other for one, other in pairs]


COMPARED = (
    ("sdk", "run", "samples", 0.85),
    ("sixteen", "sdk", "tokens", 0.7),
    ("two, one thread each", "one, one thread each", "tokens", 1.5),
)
"""Sides that are compared: which, over which, by what, and the goal."""


def print_table(rounds: list[Round]) -> None:
    table = new_table(
        "Loops against a server: medians over rounds (lowest-highest)", ["side"], ["samples/s", "tokens/s"]
    )
    for side in dict.fromkeys(entry["side"] for entry in rounds):
        table.add_row(side, *(spread(rates(rounds, side, unit), 1) for unit in ("samples", "tokens")))
    show(table, 110)
    for side, over, unit, _ in COMPARED:
        print(f"{side} over {over}, {unit}/s: {spread(ratios(rounds, side, over, unit), 2)}")


def targets_of(rounds: list[Round]) -> list[Target]:
    return [
        Target(f"{side}: {unit}/s over {over}", statistics.median(ratios(rounds, side, over, unit)), "x", ">=", goal)
        for side, over, unit, goal in COMPARED
    ]


def main() -> None:
    arguments = parse_arguments(__doc__)
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        work = Path(folder)
        build_fresh_model(work / "model", FreshModelConfig(), seed=0)
        write_prompts(work / "prompts.jsonl")
        rounds = measure(work, num_rounds)
    targets = targets_of(rounds)
    print_table(rounds)
    print_targets(targets)
    write_json(arguments.json, "serve", rounds, targets)


if __name__ == "__main__":
    main()
