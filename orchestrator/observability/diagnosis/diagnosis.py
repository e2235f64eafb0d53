"""Looks at a run after each step, and tells what it finds once."""

from collections.abc import Mapping
from typing import Any

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.observability.diagnosis.rules import findings
from penstock.orchestrator.observability.diagnosis.seen import Finding, Seen
from penstock.orchestrator.observability.reporting.progress import Progress
from penstock.orchestrator.run_directory.run_directory import RunDirectory


class Diagnosis:
    """Lifecycle: `look` with each step's metrics. A finding is told when it appears, and again only after it was gone
    for a whole window."""

    def __init__(
        self, config: DiagnosisConfig, max_staleness: int, directory: RunDirectory, progress: Progress
    ) -> None:
        self._config, self._max_staleness = config, max_staleness
        self._directory, self._progress = directory, progress
        self._seen = Seen(config.window)
        self._told: dict[str, int] = {}
        """The step at which each rule last found something, by rule."""

    def look(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Look at a step's metrics. Returns new findings."""
        if not self._config.enabled:
            return []
        self._seen.add(metrics)
        new = []
        for found in findings(self._seen, self._config, self._max_staleness):
            before = self._told.get(found.rule)
            self._told[found.rule] = step
            if before is None or step - before > self._config.window:
                new.append(found)
                self._tell(step, found)
        return new

    def _tell(self, step: int, found: Finding) -> None:
        about = {"rule": found.rule, "text": found.text, "advice": found.advice}
        self._directory.event(found.level, step=step, **about)
        self._progress.warn(found.level, found.text, found.advice)
