"""Run directories with known content."""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from penstock.orchestrator.run_directory.picture_folder import name_of

HERE = {"pid": os.getpid(), "host": socket.gethostname()}
"""Content of run.lock for a run that goes on."""
TIME = "2026-01-01T00:00:{:02d}.000Z"

MORE = (
    "response_ids",
    "task",
    "advantage",
    "behavior_logprobs",
    "token_versions",
    "transcript",
    "turn_tokens",
    "turn_rewards",
    "turn_ids",
    "policy",
    "pictures",
)
"""Columns of samples that are as rows say them, if any does."""


def make_run(
    path: Path,
    *kinds: str,
    metrics: Iterable[Mapping[str, Any]] = (),
    holder: Mapping[str, Any] | None = None,
    config: str = "",
) -> Path:
    """`kinds`: of its events, a second apart. `config`: more lines of YAML."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        f"name: {path.name}\nrecipe: recipes/sums\nalgorithm: {{name: grpo}}\ntrainer: {{max_steps: 9}}\n{config}"
    )
    events = [{"time": TIME.format(index), "kind": kind, "message": "no room"} for index, kind in enumerate(kinds)]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if holder is not None:
        (path / "run.lock").write_text(json.dumps(holder) + "\n")
    return path


def steps(count: int) -> list[dict[str, Any]]:
    """Rewards that rise by a tenth; accuracy after the first step."""
    lines = [{"step": step, "reward/mean": step / 10} for step in range(1, count + 1)]
    return [lines[0] | {"accuracy/heldout": 0.25}, *lines[1:]] if lines else []


def write_samples(directory: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Rows of {group, reward, text, tokens, finish}, and columns of `MORE`."""
    directory.mkdir(exist_ok=True)
    table = {
        "group_id": [row["group"] for row in rows],
        "row_id": [step * 100 + place for place in range(len(rows))],
        "task": [json.dumps({"prompt": f"question {row['group']}"}) for row in rows],
        "response_ids": [list(range(row.get("tokens", 3))) for row in rows],
        "response_text": [row.get("text", "") for row in rows],
        "finish_reason": [row.get("finish", "stop") for row in rows],
        "reward": [row["reward"] for row in rows],
        "advantage": [0.5 for _ in rows],
    }
    table |= {name: [row.get(name) for row in rows] for name in MORE if any(name in row for row in rows)}
    target = directory / f"step_{step}.parquet"
    parquet.write_table(pa.table(table), part := target.with_suffix(".part"))
    part.replace(target)  # as a run writes it: whole or not at all


def write_pictures(run: Path, *pictures: bytes) -> list[str]:
    """Write the run's pictures. Returns their names."""
    (run / "pictures").mkdir(exist_ok=True)
    for picture in pictures:
        (run / "pictures" / name_of(picture)).write_bytes(picture)
    return [name_of(picture) for picture in pictures]


def append(file: Path, line: Mapping[str, Any]) -> None:
    """A whole line, as a run writes it."""
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")
