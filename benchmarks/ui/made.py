"""Large runs, as people have them: metrics of 10,000 steps, a million samples. Written as a run writes them."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.orchestrator.run_directory.run_directory import RunDirectory

KEYS = (
    *(f"reward/{name}" for name in ("mean", "std", "min", "max")),
    *(f"response_length/{name}" for name in ("mean", "max", "clip_ratio")), "length_bias",
    *(f"actor/{name}" for name in ("pg_loss", "kl", "entropy", "grad_norm", "clip_fraction", "lr")),
    *(f"staleness/{name}" for name in ("mean", "max", "worst", "0", "1", "2")),
    *(f"mismatch/{name}" for name in ("logprob_abs_mean", "logprob_abs_max", "kl")),
    *(f"timing_s/{name}" for name in ("step", "rollout", "reward", "compute", "train", "keep", "publish")),
    "timing_s/checkpoint", "actor/skipped_nonfinite",
    *(f"idle/{name}" for name in ("rollout", "train")), "perf/samples_per_s", "perf/tokens_per_s",
    *(f"store/{name}" for name in ("rows", "groups", "active_groups", "bytes", "leases", "blocks", "shared_bytes")),
    *(f"store/{what}/{stage}" for what in ("ready", "wait_s") for stage in ("rollout", "reward", "compute", "train")),
    *(f"leases/{stage}" for stage in ("rollout", "reward", "compute", "train")),
    *(f"completed/{stage}" for stage in ("rollout", "reward", "compute")),
    *(f"dropped/{reason}" for reason in ("stale", "reward_error", "prompt_too_long", "zero_spread")),
    *(f"rollout/groups/Rollout-{engine}" for engine in range(8)), "rollout/groups_spread", "rollout/num_engines",
    "reward/num_workers", *(f"faults/{role}" for role in ("rollout", "trainer", "reward", "lost_s", "effective_time")),
    "recording/lost", "recording/waiting", "checkpoint/failed",
    *(f"stragglers/{name}" for name in ("offered", "won", "late_rows", "late_tokens")),
)  # fmt: skip
"""Keys of the metrics, one number a step each."""
ROWS, TOKENS = 256, 8
"""Number of samples a step and of tokens a sample, as in the demo."""
WORDS = ("seven", "and", "four", "make", "eleven", "twelve", "so", "the", "sum", "is")
BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
CONFIG = """\
name: {name}
recipe: recipes/arithmetic
seed: {seed}
max_staleness: 1
algorithm: {{name: grpo, group_size: 8}}
trainer: {{max_steps: {steps}, groups_per_step: 32}}
"""


def make_runs(place: Path, num_runs: int, num_steps: int, num_samples: int) -> None:
    """Make run0 to run9: the first one has the samples."""
    for seed in range(num_runs):
        _make_run(place / f"run{seed}", seed, num_steps)
    write_samples(RunDirectory(place / "run0"), num_samples)


def _make_run(path: Path, seed: int, num_steps: int) -> None:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG.format(name=path.name, seed=seed, steps=num_steps))
    random = np.random.default_rng(seed)
    values_NK = np.abs(np.cumsum(random.normal(size=(num_steps, len(KEYS))), axis=0) / 100)
    with (path / "metrics.jsonl").open("w") as opened:
        for step, values in enumerate(values_NK.tolist(), start=1):
            line: dict[str, Any] = {"step": step, "policy_version": step, **dict(zip(KEYS, values, strict=True))}
            if step % 10 == 0:
                line["accuracy/heldout"] = step / num_steps
            opened.write(json.dumps(line) + "\n")
    events = [(0, "start"), *((at, "checkpoint") for at in range(100, num_steps, 100)), (num_steps, "end")]
    (path / "events.jsonl").write_text("".join(
        json.dumps({"time": (BEGUN + timedelta(seconds=at)).isoformat(), "kind": kind, "step": at}) + "\n"
        for at, kind in events
    ))  # fmt: skip


def write_samples(directory: RunDirectory, count: int) -> None:
    """Write samples, `ROWS` a file."""
    random = np.random.default_rng(0)
    for step in range(1, -(-count // ROWS) + 1):
        directory.write_samples(step, samples_of(step, min(ROWS, count - (step - 1) * ROWS), random))


def samples_of(step: int, count: int, random: np.random.Generator) -> pa.Table:
    """Make a table with the columns that `SampleLog` writes."""
    rows = np.arange(count)
    sums = random.integers(10, 100, size=(count, 2)).tolist()
    words = random.integers(len(WORDS), size=(count, TOKENS)).tolist()
    rewards = random.integers(0, 5, size=count) / 4
    return pa.table({
        "row_id": (step - 1) * ROWS + rows,
        "group_id": ((step - 1) * ROWS + rows) // 8,
        "task": [json.dumps({"prompt": f"{a} + {b} = ", "answer": str(a + b)}) for a, b in sums],
        "prompt_ids": [[a, 10, b, 11] for a, b in sums],
        "response_ids": words,
        "response_text": [" ".join(WORDS[word] for word in line) for line in words],
        "finish_reason": np.where(rewards > 0, "stop", "length"),
        "reward": rewards.astype(np.float32),
        "advantage": random.normal(size=count).astype(np.float32),
        "token_versions": [[step - 1] * TOKENS] * count,
        "behavior_logprobs": (-random.exponential(size=(count, TOKENS)).astype(np.float32)).tolist(),
    })  # fmt: skip
