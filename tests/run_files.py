"""What a run has left in its directory, for tests of whole runs."""

import json
from pathlib import Path
from typing import Any


def metrics_of(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, every one of them whole."""
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def events_of(directory: str | Path) -> list[dict[str, Any]]:
    """The lines of `events.jsonl`."""
    return [json.loads(line) for line in (Path(directory) / "events.jsonl").read_text().splitlines()]
