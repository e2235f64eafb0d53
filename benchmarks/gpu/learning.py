"""The arithmetic recipe on GPUs: does it learn there as on a CPU, by every transport that the machine allows?

    python -m benchmarks.gpu.learning --json gpu_learning.json

Whole runs of `penstock run recipe=arithmetic` in bfloat16. One GPU: trainer and engine share it, weights by `shm` and
by `ipc`. Two: `nccl` as well, one GPU each. Accuracy is greedy, on held-out problems, before and after.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import count_gpus, gpu_names
from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, write_json
from benchmarks.learning import MARGIN, accuracies, penstock, worst_gain

SHARES = {"shm": (0.5, 0.5), "ipc": (0.5, 0.5), "nccl": (1, 1)}
"""GPUs of trainer and engine."""


def words(transport: str, seed: int, work: Path, *, quick: bool) -> list[str]:
    """Words of the command line. The warm start trains on a GPU too: it comes before, alone."""
    trainer, engine = SHARES[transport]
    steps = ["trainer.max_steps=5", "evaluation.every_steps=5"] if quick else []
    first = ["trainer.num_gpus_per_rank=1", *(["trainer.max_steps=60"] if quick else [])]
    quoted = ",".join(f"'{word}'" for word in first)
    return [
        "recipe=arithmetic",
        f"seed={seed}",
        f"name={transport}-{seed}",
        f"output_dir={work}",
        f"weights.transport={transport}",
        f"trainer.num_gpus_per_rank={trainer}",
        f"rollout.num_gpus_per_worker={engine}",
        "rollout.dtype=bfloat16",
        "trainer.dtype=bfloat16",
        "rollout.gpu_memory_utilization=0.3",
        "rollout.enforce_eager=false",
        f"warm_start.overrides=[{quoted}]",
        *steps,
    ]


def measure(transport: str, seed: int, work: Path, *, quick: bool) -> dict[str, Any]:
    name = f"{transport}-{seed}"
    seconds = penstock(words(transport, seed, work, quick=quick), work / f"{name}.log")
    first, *_, last = accuracies(work / name)
    return {"transport": transport, "seed": seed, "start": first, "end": last, "seconds": seconds}


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("Held-out accuracy, greedy", ["transport"], ["seed", "start", "end", "seconds"])
    for entry in rounds:
        table.add_row(
            entry["transport"],
            str(entry["seed"]),
            f"{entry['start']:.1%}",
            f"{entry['end']:.1%}",
            f"{entry['seconds']:.0f}",
        )
    show(table)


def main() -> None:
    arguments = parse_arguments(__doc__)
    transports = ["shm", "ipc"] + (["nccl"] if count_gpus("learning") > 1 else [])
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for seed in range(1 if arguments.quick else arguments.rounds or 1):
            for transport in transports:
                rounds.append(measure(transport, seed, Path(folder), quick=arguments.quick))
                print(rounds[-1], flush=True)
    print_rounds(rounds)
    targets = []
    for transport in transports:
        some = [entry for entry in rounds if entry["transport"] == transport]
        targets.append(Target(f"{transport}: gain of the worst seed", worst_gain(some), "", ">=", MARGIN))
    print_targets(targets)
    write_json(arguments.json, "gpu_learning", rounds, targets, gpus=gpu_names())


if __name__ == "__main__":
    main()
