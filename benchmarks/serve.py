"""Loops through the SDK `tinker` against a server, over the same loop in `penstock run`, and many adapters over one.

    python -m benchmarks.serve --json serve.json

GRPO on a fresh model (4 layers, hidden 256, fp32) with adapters of rank 8: 8 prompts x 8 samples a step, at most 32 new
tokens, one engine (hf, then vLLM) and one rank. All sides run on the same cores; the processor time of the clients is
in their figures, since they run on them, too.

    run      penstock run, max_staleness=0, trainer.lora.publish=adapter
    sdk      one loop through the SDK
    two      two loops at the same time, each with an adapter of its own
    sixteen  sixteen loops, of 2 prompts a step each

`one thread`: engine and rank have one thread each, so that one can compute beside the other. Medians over rounds, in
brackets the lowest and the highest; ratios are of the same round.
"""

import statistics
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
"""Measured steps of a loop and round; those of sixteen loops are smaller and fewer."""
ENGINES = {
    "hf": ["rollout.engine=hf", "rollout.max_model_len=128"],
    "vllm": ["rollout.enforce_eager=true", "rollout.kv_cache_gib=0.5", "rollout.max_model_len=128"],
}
ONE_THREAD = ["rollout.num_threads=1", "trainer.num_threads=1"]
SIXTEEN = {"clients": 16, "steps": 2, "prompts": 2}
Round = dict[str, Any]


def start_sides(work: Path, engine: str) -> dict[str, Child]:
    common = ["--model", str(work / "model"), "--prompts", str(work / "prompts.jsonl")]
    common += ["--max-new-tokens", str(MAX_NEW_TOKENS)]
    adapter = [f"trainer.lora.rank={RANK}", "trainer.lora.publish=adapter"]
    served = ["--rank", str(RANK), *ENGINES[engine], f"serve.max_rank={RANK}"]
    words = {
        "run": ["--workload", "long_tailed", *ENGINES[engine], *adapter], "sdk": served,
        "one thread": [*served, *ONE_THREAD],
    }  # fmt: skip
    sides = {}
    for name, own in words.items():
        stem = f"{engine}_{name.replace(' ', '_')}"
        peer = "penstock_grpo" if name == "run" else "sdk_loops"
        arguments = [*common, "--output-dir", str(work / stem), *own]
        sides[name] = Child(name, peer, work / f"{stem}.log", arguments, environment=ENVIRONMENT)
        sides[name].ready()
    return sides


def measure(work: Path, engine: str, num_rounds: int) -> list[Round]:
    sides = start_sides(work, engine)
    rounds: list[Round] = []

    def note(number: int, side: str, answer: dict[str, Any]) -> None:
        rounds.append({"engine": engine, "round": number, "side": side, **answer})
        rate = answer["tokens"] / answer["seconds"]
        print(
            f"{engine} {side}: {answer['samples'] / answer['seconds']:.1f} samples/s, {rate:.0f} tokens/s", flush=True
        )

    try:
        sides["sdk"].ask(SIXTEEN | {"steps": 1})  # not measured: first rounds are slower
        sides["one thread"].ask({"steps": 1, "clients": 2})
        for number in range(num_rounds):
            note(number, "run", sides["run"].round(STEPS))
            note(number, "sdk", sides["sdk"].ask({"steps": STEPS}))
            note(number, "sixteen", sides["sdk"].ask(SIXTEEN))
            note(number, "one, one thread each", sides["one thread"].ask({"steps": STEPS}))
            note(number, "two, one thread each", sides["one thread"].ask({"steps": STEPS, "clients": 2}))
    finally:
        for child in sides.values():
            child.close()
    return rounds


def rates(rounds: list[Round], engine: str, side: str, unit: str) -> list[float]:
    return [entry[unit] / entry["seconds"] for entry in rounds if (entry["engine"], entry["side"]) == (engine, side)]


def ratios(rounds: list[Round], engine: str, side: str, over: str, unit: str) -> list[float]:
    """Ratios of rates of the same round."""
    pairs = zip(rates(rounds, engine, side, unit), rates(rounds, engine, over, unit), strict=True)
    return [one / other for one, other in pairs]


COMPARED = (
    ("sdk", "run", "samples", 0.85),
    ("sixteen", "sdk", "tokens", 0.7),
    ("two, one thread each", "one, one thread each", "tokens", 1.5),
)
"""Sides that are compared: which, over which, by what, and the goal."""


def print_table(rounds: list[Round]) -> None:
    title = "Loops against a server: medians over rounds (lowest-highest)"
    table = new_table(title, ["engine", "side"], ["samples/s", "tokens/s"])
    for engine, side in dict.fromkeys((entry["engine"], entry["side"]) for entry in rounds):
        values = [rates(rounds, engine, side, unit) for unit in ("samples", "tokens")]
        table.add_row(engine, side, *(spread(one, 1) for one in values))
    show(table, 110)
    for engine in dict.fromkeys(entry["engine"] for entry in rounds):
        for side, over, unit, _ in COMPARED:
            print(f"{engine}: {side} over {over}, {unit}/s: {spread(ratios(rounds, engine, side, over, unit), 2)}")


def targets_of(rounds: list[Round]) -> list[Target]:
    found = [(engine, *one) for engine in dict.fromkeys(entry["engine"] for entry in rounds) for one in COMPARED]
    return [
        Target(
            f"{engine}: {side}, {unit}/s over {over}",
            statistics.median(ratios(rounds, engine, side, over, unit)), "x", ">=", goal,
        )
        for engine, side, over, unit, goal in found
    ]  # fmt: skip


def main() -> None:
    arguments = parse_arguments(__doc__, list(ENGINES))
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        work = Path(folder)
        build_fresh_model(work / "model", FreshModelConfig(), seed=0)
        write_prompts(work / "prompts.jsonl")
        for engine in arguments.sides or ENGINES:
            rounds += measure(work, engine, num_rounds)
    targets = targets_of(rounds)
    print_table(rounds)
    print_targets(targets)
    write_json(arguments.json, "serve", rounds, targets)


if __name__ == "__main__":
    main()
