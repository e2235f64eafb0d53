"""The files of a simulated run, as a run writes them: `penstock ui` and `penstock report` show it like one.

    SimulatedStep, the store's work log ─▶ spans.jsonl, timeline.json      StepReport, counters ─▶ metrics.jsonl

The code of real runs makes the lines. Times continue from the moment at which the simulation began. There are no
rewards, losses or samples: nothing is computed.
"""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.conf.run import RunConfig
from penstock.orchestrator.observability.reporting.metrics import StepTimes, joined, step_metrics
from penstock.orchestrator.observability.state_log import awaited, views_of
from penstock.orchestrator.observability.step_trace import (
    ENGINES,
    TRAINER,
    ClosedStep,
    spans_of_ranks,
    traced,
)
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.timeline import Span, Work, WorkReport
from penstock.planner.simulation.simulated_trainer import SimulatedStep
from penstock.planner.simulation.simulation import Simulation
from penstock.store.service.store_stats import stats
from penstock.workers.trainer.step_report import StepReport, TrainedRows

TURN = "change of turns"


class RunFiles:
    """A watcher that writes. Lifecycle: made before the run, told of each step, `close`."""

    def __init__(self, simulation: Simulation, directory: RunDirectory) -> None:
        """`simulation`: one that keeps a log of who works on what (`epoch_s`)."""
        assert simulation.log is not None
        assert simulation.epoch_s is not None
        self._simulation, self.directory, self._epoch_s = simulation, directory, simulation.epoch_s
        self._log, self._config = simulation.log, simulation.config
        self._reports: dict[int, list[StepReport]] = {}
        self._rank: list[Span] = []
        self._ended_at = self._closed_at = 0.0
        self._busy: dict[str, float] = {}
        self._lost_at: dict[str, float] = {}
        simulation.trainer.watchers.append(self)
        simulation.trainer.on_change = self._changed
        if simulation.engines is not None:
            simulation.engines.on_change, simulation.engines.on_load = self._changed, self._loaded
        directory.clock = lambda: self._at(simulation.clock.now)
        directory.event("start", num_steps=self._config.trainer.max_steps, simulated=True)
        reserved = {"cpus": sum(actor.num_cpus for actor in simulation.plan),
                    "gpus": sum(actor.num_gpus for actor in simulation.plan)}  # fmt: skip
        directory.event("placed", actors={}, **reserved)
        directory.event("serving", seconds=0.0)

    def close(self) -> None:
        """Write the end, and the timeline."""
        seconds = self._simulation.clock.now
        self.directory.event("end", steps=self._simulation.trainer.num_served, seconds=seconds)
        self.directory.close()

    # Steps.

    def trained(self, step: SimulatedStep) -> None:
        reports = [self._report(step, rows) for rows in step.parts]
        self._reports[step.step] = reports
        by_rank = spans_of_ranks(self._names(TRAINER), step.step, self._shown(reports), self._at(step.updated))
        if step.taken > step.formed:
            by_rank = [_with_turn(spans, self._at(step.formed)) for spans in by_rank]
        for spans in by_rank:
            for span in spans:
                self.directory.timeline.add(span)
        self._rank = by_rank[0]

    def closed(self, step: SimulatedStep) -> None:
        start, end = self._at(self._closed_at), self._at(step.closed)
        if step.counted > step.updated:
            self._span(TRAINER, "wait for the version before", step.updated, step.counted, step.step - 1)
        if self._config.max_staleness:
            self._span(TRAINER, "publish", step.published, step.closed, step.step)
        groups = {int(row) // self._simulation.store.ledger.residents.size
                  for report in self._reports[step.step] for row in report.row_ids}  # fmt: skip
        closed = ClosedStep(step.step, start, end, self._rank, groups)
        members = {TRAINER: self._names(TRAINER), ENGINES: self._names("rollout")}
        serving: dict[str, list[str]] = {}
        for name, stage in self._members().items():
            serving.setdefault(stage, []).append(name)
        waits = awaited(views_of(self._simulation.flow, serving))
        waits = {name: what for name, what in waits.items() if name not in members[TRAINER]}
        self.directory.log_spans(traced(closed, self._worked(), self.directory.timeline.take(), members, waits))
        self._closed_at, self._rank = step.closed, []

    def served(self, step: SimulatedStep) -> None:
        self._span(
            "weights" if self._config.max_staleness else TRAINER, "publish", step.published, step.sealed, step.step
        )
        reports, now = self._reports[step.step], step.served
        busy = self._gained()
        times = StepTimes(
            step_s=now - self._ended_at,
            phase_s={**busy, "train": step.updated - step.taken, "publish": now - step.published},
            busy_s={"train": step.updated - step.taken, **({"rollout": busy["rollout"]} if "rollout" in busy else {})},
        )
        rows = joined([report.rows for report in reports])
        store = stats(self._simulation.store.ledger)
        if self._simulation.engines is not None:
            store["rollout/num_engines"] = len(self._simulation.engines.there)
        self.directory.log_metrics(step_metrics(step.step, step.step, rows, times, store=store))
        self._ended_at = now
        self._reports = {number: kept for number, kept in self._reports.items() if number >= step.step}

    def _report(self, step: SimulatedStep, rows: list[int]) -> StepReport:
        store, size, version = self._simulation.store, self._simulation.store.ledger.residents.size, step.step - 1
        groups = [store.ledger.residents.groups[row // size] for row in rows]
        index = [row % size for row in rows]
        lengths = np.array([one.response_tokens[i] for one, i in zip(groups, index, strict=True)], np.int64)
        sums = [store.notes[row // size].version_sums for row in rows]
        has_versions = all(one is not None for one in sums)
        oldest = np.array([one.oldest[i] for one, i in zip(groups, index, strict=True)], np.int64)
        summed = np.array([one[i] if one is not None else 0 for one, i in zip(sums, index, strict=True)], np.float64)
        trained = TrainedRows(
            reward_N=np.full(len(rows), np.nan),
            response_tokens_N=lengths,
            prompt_tokens_N=np.array([one.prompt_tokens for one in groups], np.int64),
            clipped_N=lengths >= self._config.longest_response,
            staleness_max_N=version - oldest if has_versions else np.zeros(len(rows), np.int64),
            staleness_sum_N=version * lengths - summed if has_versions else np.zeros(len(rows)),
            turns_N=np.ones(len(rows), np.int64),
        )
        waited_s, train_s = step.taken - step.began, step.updated - step.taken
        return StepReport(step.step, version, {}, trained, waited_s, train_s, {}, np.array(rows, np.int64))

    def _shown(self, reports: list[StepReport]) -> list[StepReport]:
        """A report for each rank: those that split the work on the same rows have the same."""
        each = max(1, self._config.trainer.num_ranks // len(reports))
        return [reports[rank // each] for rank in range(self._config.trainer.num_ranks)]

    # Members.

    def _members(self) -> dict[str, str]:
        """The stage of each member that is there."""
        plan = self._simulation.plan
        found = {actor.name: actor.stage for actor in plan if actor.stage is not None and actor.role != "rollout"}
        return found | dict.fromkeys(self._names("rollout"), "rollout")

    def _names(self, role: str) -> list[str]:
        if role == "rollout":
            return list(self._simulation.engines.there) if self._simulation.engines is not None else []
        return [actor.name for actor in self._simulation.plan if actor.role == role]

    def _loaded(self, name: str, version: int, began: float) -> None:
        self._span(name, "load weights", began, self._simulation.clock.now, version)

    def _changed(self, kind: str, name: str) -> None:
        """Write that a member was lost, replaced, or has joined."""
        now = self._simulation.clock.now
        about = {"member": name, "role": "rollout" if name.startswith("Rollout") else "trainer",
                 "step": self._simulation.trainer.num_served + 1}  # fmt: skip
        if kind == "lost":
            self._lost_at.setdefault(name, now)
            self.directory.event("fault", **about, error="Simulated", message="by the luck of the seed")
        elif kind == "replaced":
            seconds = now - self._lost_at.pop(name, now)
            self.directory.event("recovered", **about, seconds=round(seconds, 3))
        else:
            self.directory.event("joined", **about, node="", seconds=0.0)

    # Times.

    def _at(self, seconds: float) -> float:
        return self._epoch_s + seconds

    def _span(self, lane: str, name: str, start: float, end: float, version: int) -> None:
        self.directory.timeline.span(lane, name, self._at(start), self._at(end), version=version)

    def _gained(self) -> dict[str, float]:
        """Busy seconds of a member of each phase since the last time."""
        simulation = self._simulation
        now = {"reward": 0.0, "compute": 0.0}
        counts = {"reward": 0, "compute": 0}
        for actor in simulation.actors:
            phase = "reward" if simulation.flow.stage(actor.stage).kind == "reward" else "compute"
            now[phase] += actor.busy_s
            counts[phase] += 1
        found = {phase: seconds / counts[phase] for phase, seconds in now.items() if counts[phase]}
        if simulation.engines is not None:
            total = simulation.engines.seconds()
            busy = total.decoding + total.reading + total.loading
            found["rollout"] = busy / max(1, len(simulation.engines.there))
        gained = {phase: max(0.0, seconds - self._busy.get(phase, 0.0)) for phase, seconds in found.items()}
        self._busy = found
        return gained

    def _worked(self) -> WorkReport:
        """All that the log has noted since the last time."""
        held, missed = self._simulation.store.ledger.residents.leases.held, 0
        work, admitted = list[Work](), dict[int, float]()
        while True:
            told = self._log.take(held)
            part = WorkReport.of(told, float(told["now"]))
            work += part.work
            admitted |= part.admitted
            missed += part.missed
            if not told["more"]:
                return WorkReport(tuple(work), admitted, missed)


def _with_turn(spans: list[Span], formed: float) -> list[Span]:
    """The spans of a rank whose wait was over before the devices were its own."""
    wait, update = spans
    return [replace(wait, end=formed), Span(wait.lane, TURN, formed, wait.end, wait.details), update]


def open_directory(config: RunConfig, place: Path, now: float | None = None) -> tuple[RunDirectory, float]:
    """A new run directory below `place`, and the time at which the simulated run begins. Raises `ConfigError`."""
    simulated = replace(config, output_dir=str(place), description=f"simulated: {config.description}".rstrip(": "))
    return RunDirectory.create(simulated), time.time() if now is None else now
