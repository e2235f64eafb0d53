"""Gathers the metrics of each step from the ranks' reports, the workers and the store, and gives them to the sinks and
the display.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.observability.reporting.metrics import StepArrays, StepTimes, rank_metrics, step_metrics
from penstock.orchestrator.observability.reporting.progress import Progress
from penstock.orchestrator.observability.reporting.sinks.sink import Sink, log_to
from penstock.orchestrator.observability.reporting.usage import Usage
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.trainer.report import StepReport

QUICK_S = 60.0
"""Deadline of calls that only read counters."""


class StepLog:
    """Lifecycle: `begin` with the first step, `write` after each; `emit` for metrics of no step."""

    def __init__(
        self,
        fleet: Fleet,
        flow: Dataflow,
        stats: Callable[[], Awaitable[dict[str, float]]],
        directory: RunDirectory,
        progress: Progress,
        sinks: list[Sink],
        counters: Callable[[], Mapping[str, float]],
    ) -> None:
        """`stats`: returns those of the store. `counters`: returns the cumulative ones of the controller's own
        parts."""
        self._usage, self._stats, self._counters = Usage(fleet, flow), stats, counters
        self._directory, self._progress, self._sinks = directory, progress, sinks
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.time()

    async def write(
        self,
        step: int,
        reports: Sequence[StepReport],
        phases: Mapping[str, float],
        evaluated: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Write the step's line, and return it. `phases`: seconds of the step's phases besides its update. `evaluated`:
        what was measured after it."""
        usage = await self._usage.since_last(QUICK_S)
        store = await self._stats() | usage.dropped | usage.groups | usage.members | usage.environment
        now, train_s = time.time(), max(report.train_s for report in reports)
        kept_s = max(report.seconds.get("keep", 0.0) for report in reports)
        times = StepTimes(
            step_s=now - self._began,
            phase_s={**usage.seconds, "train": train_s, **({"keep": kept_s} if kept_s else {}), **phases},
            busy_s={"train": train_s} | ({"rollout": usage.seconds["rollout"]} if "rollout" in usage.seconds else {}),
        )
        self._began = now
        metrics = step_metrics(
            step,
            step,
            StepArrays.of_reports(reports),
            times,
            trainer=reports[0].metrics | rank_metrics(reports),
            store={**store, **self._counters()},
            generated_length_mean=usage.generated_length_mean,
            evaluated=evaluated,
        )
        self.emit(step, metrics)
        return metrics

    def emit(self, step: int, metrics: Mapping[str, Any]) -> None:
        log_to(self._sinks, step, metrics, self._directory.losses)
        self._progress.step(step, metrics)
