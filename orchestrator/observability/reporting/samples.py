"""Reads what was trained last for the report's table: the rows of the newest `samples/step_N.parquet`."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from penstock.orchestrator.run_directory.run_directory import RunDirectory

MAX_ROWS = 32
MAX_CHARACTERS = 1500


@dataclass(frozen=True)
class SampleRow:
    prompt: str
    response: str
    answer: str
    reward: float | None
    advantage: float | None
    versions: str
    """Versions of the tokens: `4`, or `3-4` where the weights changed half-way."""
    first_of_group: bool
    said: list[tuple[str, str]] = field(default_factory=list)
    """Roles and texts of a trajectory's messages, in order; empty for a prompt with one response."""


def read_samples(directory: RunDirectory, max_rows: int = MAX_ROWS) -> tuple[int, list[SampleRow]]:
    """Read the newest file that can be read. Returns (step, rows); (0, []) without one."""
    from pyarrow import ArrowException, parquet

    for file in reversed(directory.sample_files()):
        try:
            table = parquet.read_table(file).slice(0, max_rows)
        except (ArrowException, OSError):
            continue
        rows: list[dict[str, Any]] = table.to_pylist()
        return int(re.sub(r"\D", "", file.stem) or 0), _rows(rows)
    return 0, []


def _rows(rows: list[dict[str, Any]]) -> list[SampleRow]:
    result, last_prompt = [], None
    for row in rows:
        task = _task(row)
        prompt = _clip(str(row.get("prompt") or task.get("prompt") or ""))
        response = _clip(str(row.get("response_text") or row.get("response") or task.get("response") or ""))
        answer = _clip(str(task.get("answer") if task.get("answer") is not None else ""))
        versions = [version for version in row.get("token_versions") or [] if version is not None]
        low, high = (min(versions), max(versions)) if versions else (None, None)
        shown = "" if low is None else f"{low}" if low == high else f"{low}-{high}"
        said = _said(row)
        begin = str(task.get("environment_task", prompt)) if said else prompt
        first = begin != last_prompt
        result.append(SampleRow(prompt, response, answer, row.get("reward"), row.get("advantage"), shown, first, said))
        last_prompt = begin
    return result


def _said(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The conversation of a `transcript`, calls of tools included."""
    try:
        messages = json.loads(row.get("transcript") or "[]")
    except (TypeError, json.JSONDecodeError):
        return []
    return [(str(message.get("role")), _clip(_text(message))) for message in messages if isinstance(message, dict)]


def _text(message: dict[str, Any]) -> str:
    thinking = message.get("reasoning_content")
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    parts = [f"({thinking})" if thinking else "", str(message.get("content") or "")]
    return "\n".join(filter(None, [*parts, *(f"{call.get('name')}({call.get('arguments')})" for call in calls)]))


def _task(row: dict[str, Any]) -> dict[str, Any]:
    """The dataset's row, which the `task` column has as JSON."""
    try:
        task = json.loads(row.get("task") or "{}")
    except (TypeError, json.JSONDecodeError):
        return {}
    return task if isinstance(task, dict) else {}


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
