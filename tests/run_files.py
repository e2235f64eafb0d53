"""What a run has left in its directory, for tests of whole runs."""

import json
import math
from pathlib import Path
from typing import Any

from pyarrow import parquet


def metrics_of(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, every one of them whole."""
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def events_of(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`."""
    return [json.loads(line) for line in (Path(directory) / "events.jsonl").read_text().splitlines()]


def sampled_difference(directory: str | Path, step: int, age: int = 0) -> float:
    """Mean |log p of the trainer - log p of the engine| over the tokens that a step trained, by its samples: those that
    are `age` versions older than its weights. NaN: there are none."""
    columns = ("trainer_logprobs", "behavior_logprobs", "token_versions")
    tokens = [token for row in samples_of(directory, step) for token in zip(*map(row.get, columns), strict=True)]
    wanted = [(trainer, engine) for trainer, engine, version in tokens if version == step - 1 - age]
    found = [abs(trainer - engine) for trainer, engine in wanted if trainer is not None]
    return sum(found) / len(found) if found else math.nan


def samples_of(directory: str | Path, step: int) -> list[dict[str, Any]]:
    """The rows of `samples/step_N.parquet`."""
    rows: list[dict[str, Any]] = parquet.read_table(Path(directory) / "samples" / f"step_{step}.parquet").to_pylist()
    return rows
