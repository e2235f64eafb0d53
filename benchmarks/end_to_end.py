"""GRPO end to end: Penstock (max_staleness 0 and 1) against TRL's GRPOTrainer, alternating on the same cores.

    make bench-env && python -m benchmarks.end_to_end --json end_to_end.json

Same model (4 layers, hidden 256, fp32), prompts, reward, 8 prompts x 8 samples a step. Two workloads: *fixed* (64 new
tokens) and *long-tailed* (at most 256; the model's own end-of-sequence token ends a response). Medians of samples/s
over rounds.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Child, Target, new_table, parse_arguments, print_targets, show, write_json
from penstock.conf.model import FreshModelConfig
from penstock.workers.models.fresh import build_fresh_model

NUM_PROMPTS = 512
WORKLOADS = {"fixed": 64, "long_tailed": 256}
"""Most new tokens."""
SETTLE_STEPS = 3
"""Steps of TRL before each of its rounds, not measured: its first ones after a pause are slow. Penstock leaves out
as many by itself."""
PENSTOCK_SETTINGS = {
    "sync": ["rollout.num_workers=2", "rollout.num_threads=1", "rollout.enforce_eager=false"],
    "async": ["rollout.enforce_eager=false"],
}
"""Those that were fastest here, as for TRL: layers of the engine compiled, and where nobody trains meanwhile an engine
on each core. An asynchronous run finds its numbers of threads by itself."""
STEPS = {"fixed": 6, "long_tailed": 3}
"""Measured steps a round."""
NUM_ROUNDS = 4
TARGETS = {("fixed", "sync"): 1.1, ("fixed", "async"): 1.4, ("long_tailed", "sync"): 2.0, ("long_tailed", "async"): 3.5}
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"


def write_prompts(file: Path) -> None:
    lines = [json.dumps({"prompt": f"Calculate {17 + 3 * i % 80} + {11 + 7 * i % 80}."}) for i in range(NUM_PROMPTS)]
    file.write_text("\n".join(lines) + "\n")


def start_sides(workload: str, work: Path) -> dict[str, Child]:
    common = ["--model", str(work / "model"), "--prompts", str(work / "prompts.jsonl"), "--workload", workload]
    common += ["--max-new-tokens", str(WORKLOADS[workload])]
    sides = {"trl": Child("TRL", "trl_grpo", work / f"trl_{workload}.log", common, TRL_PYTHON)}
    for name, staleness in (("sync", 0), ("async", 1)):
        extra = ["--max-staleness", str(staleness), "--output-dir", str(work / f"runs_{workload}_{name}")]
        log = work / f"{name}_{workload}.log"
        sides[name] = Child(f"Penstock {name}", "penstock_grpo", log, [*common, *extra, *PENSTOCK_SETTINGS[name]])
    return sides


def measure(workload: str, work: Path, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    sides = start_sides(workload, work)
    rounds = []
    try:
        for child in sides.values():
            child.ready()
        for child in sides.values():  # one unmeasured round each: first rounds are slower
            child.round(2)
        for number in range(num_rounds):
            for name, child in sides.items():
                if name == "trl":
                    child.round(SETTLE_STEPS)
                answer = child.round(num_steps)
                rounds.append({"workload": workload, "side": name, "round": number, **answer})
                print(f"{workload} {name}: {answer['samples'] / answer['seconds']:.1f} samples/s", flush=True)
    finally:
        for child in sides.values():
            child.close()
    return rounds


def samples_per_s(rounds: list[dict[str, Any]], workload: str, side: str) -> float:
    chosen = [entry for entry in rounds if entry["workload"] == workload and entry["side"] == side]
    return statistics.median(entry["samples"] / entry["seconds"] for entry in chosen)


def tokens_per_s(rounds: list[dict[str, Any]], workload: str, side: str) -> float:
    chosen = [entry for entry in rounds if entry["workload"] == workload and entry["side"] == side]
    return statistics.median(entry["tokens"] / entry["seconds"] for entry in chosen)


def phases(rounds: list[dict[str, Any]], workload: str, side: str) -> str:
    chosen = [
        entry["phases"]
        for entry in rounds
        if entry["workload"] == workload and entry["side"] == side and "phases" in entry
    ]
    if not chosen:
        return ""
    medians = {name: statistics.median(value for entry in chosen for value in entry[name]) for name in chosen[0]}
    return " ".join(f"{name} {1000 * value:.0f}" for name, value in medians.items())


def print_table(rounds: list[dict[str, Any]], workloads: list[str]) -> None:
    table = new_table(
        "End to end: medians over rounds",
        ["workload", "side"],
        ["samples/s", "tokens/s", "x TRL (samples)", "x TRL (tokens)", "ms a step, by phase"],
    )
    for workload in workloads:
        for side in ("trl", "sync", "async"):
            samples, tokens = samples_per_s(rounds, workload, side), tokens_per_s(rounds, workload, side)
            table.add_row(
                workload, side, f"{samples:.1f}", f"{tokens:.0f}",
                f"{samples / samples_per_s(rounds, workload, 'trl'):.2f}",
                f"{tokens / tokens_per_s(rounds, workload, 'trl'):.2f}", phases(rounds, workload, side),
            )  # fmt: skip
    show(table, 150)


def main() -> None:
    arguments = parse_arguments(__doc__)
    if not TRL_PYTHON.exists():
        raise SystemExit("There is no .venv-trl: run `make bench-env` first.")
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    workloads = ["fixed"] if arguments.quick else list(WORKLOADS)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        work = Path(folder)
        build_fresh_model(work / "model", FreshModelConfig(), seed=0)
        write_prompts(work / "prompts.jsonl")
        for workload in workloads:
            rounds += measure(workload, work, num_rounds, STEPS[workload])
    targets = [
        Target(
            f"{workload}, {side}: samples/s over TRL's",
            samples_per_s(rounds, workload, side) / samples_per_s(rounds, workload, "trl"),
            "x",
            ">=",
            goal,
        )
        for (workload, side), goal in TARGETS.items()
        if workload in workloads
    ]
    print_table(rounds, workloads)
    print_targets(targets)
    write_json(arguments.json, "end_to_end", rounds, targets)


if __name__ == "__main__":
    main()
