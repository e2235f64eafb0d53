"""What a run has left in its directory, for tests of whole runs."""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow import parquet


def metrics_of(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, every one of them whole."""
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def events_of(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`."""
    return [json.loads(line) for line in (Path(directory) / "events.jsonl").read_text().splitlines()]


def sampled_difference(directory: str | Path, step: int, age: int = 0, *, by_turn: bool = False) -> float:
    """Mean |log p of the trainer - log p of the engine| over the tokens that a step trained, by its samples: those that
    are `age` versions older than its weights; `by_turn`: that, or a token before them in their turn. NaN: there are
    none."""
    columns = ("trainer_logprobs", "behavior_logprobs", "token_versions")
    rows = samples_of(directory, step)
    if by_turn:
        rows = [{**row, "token_versions": oldest_by_turn(row)} for row in rows]
    tokens = [token for row in rows for token in zip(*map(row.get, columns), strict=True)]
    wanted = [(trainer, engine) for trainer, engine, version in tokens if version == step - 1 - age]
    found = [abs(trainer - engine) for trainer, engine in wanted if trainer is not None]
    return sum(found) / len(found) if found else math.nan


def oldest_by_turn(row: Mapping[str, Any]) -> list[int]:
    """The oldest version of each sampled token of an attempt and those before it in its turn."""
    found: list[int] = []
    for count in row["turn_tokens"]:
        found += itertools.accumulate(row["token_versions"][len(found) : len(found) + count], min)
    return found


def samples_of(directory: str | Path, step: int) -> list[dict[str, Any]]:
    """The rows of `samples/step_N.parquet`."""
    rows: list[dict[str, Any]] = parquet.read_table(Path(directory) / "samples" / f"step_{step}.parquet").to_pylist()
    return rows
