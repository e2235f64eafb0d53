"""Records everything about a run, in one place: the controller reports what has happened, and others read it. The files
are those of `orchestrator/observability/`.

    a step's numbers   reporting/step_log.py ─▶ metrics.jsonl, sinks, display    its samples     reporting/sample_log.py
    busy actors        step_trace.py ─▶ spans.jsonl                              waiting actors  state_log.py
    printed lines      actor_logs.py ─▶ logs/                                    advice          diagnosis.py

The observer decides nothing about the run.
"""

import contextlib
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.ray_calls import answer
from penstock.orchestrator.observability.actor_logs import Logs
from penstock.orchestrator.observability.charts.known_curves import KnownCurves
from penstock.orchestrator.observability.diagnosis import Diagnosis, Stalls
from penstock.orchestrator.observability.link_speeds import Links
from penstock.orchestrator.observability.reporting.sample_log import SampleLog
from penstock.orchestrator.observability.reporting.sinks import Sink
from penstock.orchestrator.observability.reporting.step_log import QUICK_S, StepLog
from penstock.orchestrator.observability.state_log import StateLog, awaited, stages_of
from penstock.orchestrator.observability.step_trace import StepTrace
from penstock.orchestrator.recovery.liveness import Watch
from penstock.orchestrator.recovery.restart import Recovery
from penstock.orchestrator.run_context import RunContext
from penstock.store.data.rows import Rows
from penstock.workers.trainer.step_report import StepReport
from penstock.workers.weights.engine_calls import Delivery


class Observer:
    """Lifecycle: `tasks` run until the serving ends. `begin` with the first step; for each step `updated`, `sample`,
    `written` and `close`; `finish` after the last one."""

    def __init__(
        self,
        context: RunContext,
        recovery: Recovery,
        watch: Watch,
        weights_state: Callable[[], dict[str, Any]],
        counters: Callable[[], Mapping[str, float]],
        sinks: list[Sink],
    ) -> None:
        """`weights_state`: returns which versions are loaded and served. `counters`: returns the cumulative counters
        of the controller's own parts."""
        config, flow, fleet, store = context.config, context.flow, context.fleet, context.store
        directory, progress = context.directory, context.progress
        self._fleet, self._store, self._recovery = fleet, store, recovery
        self._directory, self._progress = directory, progress
        self._log = StepLog(
            fleet, flow, lambda: recovery.store.retry(store.stats), directory, progress, sinks, counters
        )
        self._samples = SampleLog(config, flow, directory, self._last_batch, lambda: fleet.role("trainer"))
        self._trace = StepTrace(
            directory, lambda: self._ask(store.work(), "work"), self._names,
            lambda: awaited(stages_of(flow, fleet)), flow.rows_per_group,
        )  # fmt: skip
        self._state = StateLog(
            fleet, flow, store.describe, weights_state, lambda: recovery.restarts.step, watch.heard, directory
        )
        self._logs, self._links = Logs(fleet, directory), Links(fleet, directory, progress)
        known = KnownCurves.of_config(directory.read_config())
        self._diagnosis = Diagnosis(config.diagnosis_of_run, config.max_staleness, directory, progress, known)
        self._stalls = Stalls(
            config.diagnosis, lambda: self._ask(store.describe(), "describe"), watch.stacks,
            {column.name: stage.name for stage in flow.stages if not stage.is_in_trainer for column in stage.writes},
            lambda: self._names("trainer"), directory, progress,
        )  # fmt: skip

    def tasks(self) -> list[Awaitable[None]]:
        """Tasks that look at the run by themselves."""
        looks = (self._state.run(), self._logs.run(), self._stalls.run(), self._links.run())
        return [self._ending_alone(look) for look in looks]

    async def _ending_alone(self, look: Awaitable[None]) -> None:
        with self._tolerant():
            await look

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Let a failed observation end alone: its error is reported, and the run continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, training continues
            trace = "".join(traceback.format_exception(error))
            self._directory.event("observing_failed", error=type(error).__name__, message=str(error), traceback=trace)
            self._progress.note(f"a part of the page will be missing: {type(error).__name__}: {error}")

    def begin(self) -> None:
        self._log.begin()
        self._trace.begin()
        self._links.begun.set()

    def is_sampled(self, step: int) -> bool:
        """Return whether the step's samples are written, so that its ranks record what they know of each token."""
        return self._samples.is_due(step)

    def updated(self, step: int, reports: Sequence[StepReport], end: float) -> None:
        """Note that all ranks have made the step's update, at `end`."""
        self._trace.updated(step, reports, end)

    def published(self, delivery: Delivery) -> None:
        """Note that a version of the weights is sealed."""
        self._log.published(delivery)

    async def sample(self, step: int, reports: Sequence[StepReport]) -> None:
        """Write the step's samples, before the next step is trained: the store has its rows until then."""
        await self._samples.write(step, sum(len(report.row_ids) for report in reports))

    async def flush(self) -> None:
        """Wait until what was given to `sample` is in the directory."""
        await self._samples.flush()

    async def written(
        self,
        step: int,
        reports: Sequence[StepReport],
        phases: Mapping[str, float],
        evaluated: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Note that all of the step is done: write its line, and diagnose by it. Returns the line."""
        metrics = await self._log.write(step, reports, phases, evaluated)
        with self._tolerant():
            self._diagnosis.look(step, metrics)
        self._stalls.finished(step, metrics.get("timing_s/step"))
        return metrics

    async def written_before(self, step: int, reports: Sequence[StepReport]) -> None:
        """Write the line of a step that the command before has made, at an unknown time."""
        await self._log.write(step, reports, {})

    def emit(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write metrics that belong to no training step."""
        self._log.emit(step, metrics)

    async def close(self, step: int) -> None:
        """Close the step's trace: nothing waits for the step any more."""
        with self._tolerant():
            await self._trace.close(step)

    async def finish(self) -> None:
        with self._tolerant():
            await self._trace.finish()
        await self._samples.flush()

    async def described_store(self) -> str:
        """The store's state, for the message of an error."""
        try:
            return str(await self._ask(self._store.describe(), "describe"))
        except PenstockError as error:
            return str(error)

    async def _ask(self, call: Awaitable[dict[str, Any]], phase: str) -> dict[str, Any]:
        found: dict[str, Any] = await answer(call, name="Store", phase=phase, timeout_s=QUICK_S)
        return found

    async def _last_batch(self, columns: list[str]) -> Rows:
        return await self._recovery.store.retry(lambda: self._store.last_batch(columns))

    def _names(self, role: str) -> list[str]:
        return [name for name, _ in self._fleet.role(role)]
