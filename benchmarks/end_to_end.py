"""GRPO end to end: Penstock (max_staleness 0 and 1) against TRL's GRPOTrainer, alternating on the same cores.

    make bench-env && python -m benchmarks.end_to_end --json end_to_end.json

Same model (4 layers, hidden 256, fp32), prompts, reward, 8 prompts x 8 samples a step, and environment variables. Three
workloads: *fixed* (64 new tokens), *long-tailed* (at most 256; the model's own end-of-sequence token ends a response),
and *large* (64 new tokens of a model of 100M parameters, whose matrix products decide). Medians of samples/s over
rounds, in brackets the lowest and the highest; ratios are of the same round, over the faster of TRL's two engines.

    trl              TRL with transformers' generate
    trl_continuous   with transformers' continuous batching
    trl_vllm         a bound: with vLLM, which is never given new weights (`peers/trl_grpo.py` says why)
    hf               Penstock with its engine on transformers, max_staleness=0: what of the rest comes of vLLM
    sync, async      Penstock with vLLM, max_staleness 0 and 1. TRL is synchronous: its like is `sync`
"""

import json
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Child, Target, new_table, parse_arguments, print_targets, show, spread, write_json
from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.runtime.processes import SETTINGS

NUM_PROMPTS = 512
TRL_ENGINES = {"trl": "generate", "trl_continuous": "continuous", "trl_vllm": "vllm"}
BOUND = "trl_vllm"
"""A side that is no engine that trains: nothing is compared with it."""
STALENESS = {"hf": 0, "sync": 0, "async": 1}
FIRST_STEPS = {"async": 71}
"""Number of steps of the unmeasured first round; otherwise 2. An asynchronous run tries meanwhile whether engine and
ranks should work at the same time or take turns: its longest trial."""
PENSTOCK_SETTINGS = {
    "hf": ["rollout.engine=hf", "rollout.num_workers=2", "rollout.num_threads=1"],
    "sync": ["rollout.num_workers=2", "rollout.num_threads=1", "rollout.enforce_eager=false"],
    "async": ["rollout.enforce_eager=false"],
}
"""Settings that were fastest here, as for TRL: layers of the engine compiled, and where nothing trains meanwhile an
engine on each core. An asynchronous run finds its numbers of threads by itself."""
SIDES = (*TRL_ENGINES, *STALENESS)
ENVIRONMENT = SETTINGS
"""Environment variables of every side. Penstock's ranks and engines have them by themselves."""
NUM_ROUNDS = 3


@dataclass(frozen=True)
class Workload:
    max_new_tokens: int
    num_steps: int
    """Number of measured steps a round."""
    ends_at_eos: bool = False
    """True if the model's own end-of-sequence token ends a response."""
    model: FreshModelConfig = field(default_factory=FreshModelConfig)
    sides: tuple[str, ...] = SIDES
    settle_steps: int = 3
    """Number of TRL's steps before each of its rounds, not measured: its first ones after a pause are slow. Penstock
    leaves out as many by itself."""
    most_first_steps: int = max(FIRST_STEPS.values())
    """Limit of the steps of the unmeasured first round."""


LARGE_MODEL = FreshModelConfig(num_layers=16, hidden_size=768, intermediate_size=2048, num_heads=12, num_kv_heads=4)
WORKLOADS = {
    "fixed": Workload(max_new_tokens=64, num_steps=6),
    "long_tailed": Workload(max_new_tokens=256, num_steps=3, ends_at_eos=True),
    "large": Workload(  # a step takes a minute
        max_new_tokens=64, num_steps=1, model=LARGE_MODEL, sides=("trl", "trl_continuous", "sync"), settle_steps=1,
        most_first_steps=1,
    ),
}  # fmt: skip
TARGETS = {("fixed", "sync"): 1.3, ("fixed", "async"): 1.4, ("long_tailed", "sync"): 2.0, ("long_tailed", "async"): 3.5}
LEAST_OF_SYNC = 0.97
"""Share of the synchronous run's samples/s that the asynchronous one must reach, in the same round."""
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"


def write_prompts(file: Path) -> None:
    lines = [json.dumps({"prompt": f"Calculate {17 + 3 * i % 80} + {11 + 7 * i % 80}."}) for i in range(NUM_PROMPTS)]
    file.write_text("\n".join(lines) + "\n")


def start_sides(workload: str, work: Path, chosen: Sequence[str]) -> dict[str, Child]:
    """Start the sides of a workload, of those that are chosen. Its model lies in `work`, by its name."""
    settings = WORKLOADS[workload]
    common = ["--model", str(work / workload), "--prompts", str(work / "prompts.jsonl")]
    common += ["--workload", "long_tailed" if settings.ends_at_eos else "fixed"]
    common += ["--max-new-tokens", str(settings.max_new_tokens)]
    sides = {}
    for side in [side for side in chosen if side in settings.sides]:
        log = work / f"{side}_{workload}.log"
        if side in TRL_ENGINES:
            peer, python, words = "trl_grpo", TRL_PYTHON, ["--engine", TRL_ENGINES[side]]
            if side == BOUND:
                words += ["--vllm-from", sysconfig.get_path("purelib")]
        else:
            peer, python = "penstock_grpo", Path(sys.executable)
            words = ["--max-staleness", str(STALENESS[side]), "--output-dir", str(work / f"runs_{workload}_{side}")]
            words += PENSTOCK_SETTINGS[side]
        sides[side] = Child(side, peer, log, [*common, *words], python, environment=ENVIRONMENT)
    return sides


def measure(workload: str, work: Path, chosen: Sequence[str], num_rounds: int) -> list[dict[str, Any]]:
    sides, settings = start_sides(workload, work, chosen), WORKLOADS[workload]
    settle, rounds = settings.settle_steps, []
    try:
        for child in sides.values():
            child.ready()
        for side, child in sides.items():  # one unmeasured round each: first rounds are slower
            child.round(min(FIRST_STEPS.get(side, 2), settings.most_first_steps), settle=settle)
        for number in range(num_rounds):
            for side, child in sides.items():
                if side in TRL_ENGINES:
                    child.round(settle)
                answer = child.round(settings.num_steps, settle=settle)
                rounds.append({"workload": workload, "side": side, "round": number, **answer})
                print(f"{workload} {side}: {answer['samples'] / answer['seconds']:.1f} samples/s", flush=True)
    finally:
        for child in sides.values():
            child.close()
    return rounds


def of_side(rounds: list[dict[str, Any]], workload: str, side: str) -> list[dict[str, Any]]:
    return [entry for entry in rounds if (entry["workload"], entry["side"]) == (workload, side)]


def rates(rounds: list[dict[str, Any]], workload: str, side: str, unit: str = "samples") -> list[float]:
    """Rates of each round, a second."""
    return [entry[unit] / entry["seconds"] for entry in of_side(rounds, workload, side)]


def fastest_trl(rounds: list[dict[str, Any]], workload: str) -> str | None:
    """Find the side with the highest median. None where TRL was not measured."""
    measured = {entry["side"] for entry in rounds if entry["workload"] == workload}
    sides = [side for side in TRL_ENGINES if side in measured and side != BOUND]
    return max(sides, key=lambda side: statistics.median(rates(rounds, workload, side)), default=None)


def ratios(rounds: list[dict[str, Any]], workload: str, side: str, unit: str = "samples") -> list[float]:
    """Ratios to the rate of TRL's fastest engine in the same round; none where TRL was not measured."""
    trl = fastest_trl(rounds, workload)
    return ratios_to(trl, rounds, workload, side, unit) if trl else []


def ratios_to(other: str, rounds: list[dict[str, Any]], workload: str, side: str, unit: str = "samples") -> list[float]:
    """Ratios to the rate of another side in the same round; none where one of the two was not measured."""
    others = rates(rounds, workload, other, unit)
    return [one / another for one, another in zip(rates(rounds, workload, side, unit), others, strict=False)]


def phases(rounds: list[dict[str, Any]], workload: str, side: str) -> str:
    """Medians over steps; empty for a side that does not say."""
    chosen = [entry["phases"] for entry in of_side(rounds, workload, side) if "phases" in entry]
    names = chosen[0] if chosen else {}
    medians = {name: statistics.median(value for entry in chosen for value in entry[name]) for name in names}
    return " ".join(f"{name} {1000 * value:.0f}" for name, value in medians.items())


def print_table(rounds: list[dict[str, Any]], workloads: Sequence[str]) -> None:
    table = new_table(
        "End to end: medians over rounds (lowest-highest)",
        ["workload", "side"],
        ["samples/s", "tokens/s", "x TRL (samples)", "x TRL (tokens)", "ms a step, by phase"],
    )
    for workload in workloads:
        for side in dict.fromkeys(entry["side"] for entry in rounds if entry["workload"] == workload):
            over = [ratios(rounds, workload, side, unit) for unit in ("samples", "tokens")]
            table.add_row(
                workload, side,
                spread(rates(rounds, workload, side), 1), spread(rates(rounds, workload, side, "tokens")),
                *(spread(values, 2) if values else "" for values in over), phases(rounds, workload, side),
            )  # fmt: skip
    show(table, 170)


def targets_of(rounds: list[dict[str, Any]]) -> list[Target]:
    found = [
        (f"{workload}, {side}: samples/s over TRL's", goal, ratios(rounds, workload, side))
        for (workload, side), goal in TARGETS.items()
    ]
    found += [
        (f"{workload}, async: samples/s over sync's", LEAST_OF_SYNC, ratios_to("sync", rounds, workload, "async"))
        for workload in ("fixed", "long_tailed")
    ]
    return [Target(name, statistics.median(values), "x", ">=", goal) for name, goal, values in found if values]


def main() -> None:
    arguments = parse_arguments(__doc__, SIDES)
    if {*(arguments.sides or SIDES)} & {*TRL_ENGINES} and not TRL_PYTHON.exists():
        raise SystemExit("There is no .venv-trl: run `make bench-env` first.")
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    workloads = ["fixed"] if arguments.quick else list(WORKLOADS)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        work = Path(folder)
        write_prompts(work / "prompts.jsonl")
        for workload in workloads:
            build_fresh_model(work / workload, WORKLOADS[workload].model, seed=0)
            rounds += measure(workload, work, arguments.sides or SIDES, num_rounds)
    targets = targets_of(rounds)
    print_table(rounds, workloads)
    print_targets(targets)
    write_json(arguments.json, "end_to_end", rounds, targets)


if __name__ == "__main__":
    main()
