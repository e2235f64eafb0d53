"""The sink that every run has."""

from collections.abc import Mapping
from typing import Any

from penstock.orchestrator.run_directory.run_directory import RunDirectory


class JsonLines:
    """metrics.jsonl of the run directory, which the controller closes."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._directory.log_metrics({"step": step, **metrics})

    def close(self) -> None: ...
