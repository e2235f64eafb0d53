"""Evaluations beside training, where `max_staleness` > 0 or they have engines of their own: the store hears of a
version before it is measured.

    step n is due ─▶ a few engines are lent with version n (`loans.py`) ─▶ they measure it, the rest samples on
                                                                      └─▶ they catch up, and lease again
    an engine alone  measures version n beside its samples, and the next version waits for it
    own engines      are lent throughout (`evaluation.num_workers`): they load version n, and measure it

One evaluation runs at a time; the next waits for it. What it measures is reported as that of its version, in a line of
its own (`evaluation/step`), after later steps' lines. Where none of its engines is left, or the run has continued
without it, another engine is lent and loads the version:

    publication   nodes keep that of the version while it is measured, beside the two that take turns
    checkpoint    of that step, in a run that has resumed or lost the nodes: the publication is made again of it

Where there is neither it is lost, and counted: no other version is measured in its place.
"""

import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.conf.checks import AUTO
from penstock.conf.errors import DeadlineExceeded, PenstockError, WeightError, WorkerDied
from penstock.orchestrator.checkpointing.checkpoints import CheckpointWriter
from penstock.orchestrator.checkpointing.export import publish_checkpoint
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, answer, held_back, is_recoverable, try_all
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.control.evaluation import HELDOUT, Evaluator
from penstock.orchestrator.control.loans import EngineLoans
from penstock.orchestrator.run_context import RunContext
from penstock.workers.protocols import Publication

LOST = "evaluation/lost"
"""Metric: number of evaluations that came to no result."""
EVENT = "evaluation_lost"
MARGIN = 0.9
"""Share of the time until the next evaluation in which this one is to be done."""
LOOK_S = 1.0
"""Seconds between two looks whether a run that waits for an evaluation is preempted, or an engine can be lent."""
PRESENT_S = 10.0
"""Deadline for an engine to say which version it has."""


def engines_to_lend(share: int | str, num_engines: int, engine_s: float | None, until_next_s: float) -> int:
    """Number of engines that an evaluation is lent, of those that sample; 0: one engine alone does both.

    `share`: `evaluation.share`. `engine_s`: seconds of one engine for all of an evaluation; None: not measured yet.
    `until_next_s`: seconds until the next evaluation.

    >>> [engines_to_lend("auto", 8, seconds, 100.0) for seconds in (None, 80.0, 200.0, 5000.0)]
    [1, 1, 3, 7]
    >>> engines_to_lend(3, 8, 80.0, 100.0), engines_to_lend(3, 2, 80.0, 100.0), engines_to_lend("auto", 1, 80.0, 9.0)
    (3, 1, 0)
    """
    most = num_engines - 1
    if share != AUTO:
        return min(int(share), most)
    if engine_s is None or until_next_s <= 0:
        return min(1, most)
    return max(min(1, most), min(most, math.ceil(engine_s / (MARGIN * until_next_s))))


class Measuring:
    """The fleet as an evaluator sees it: engines that have one version, and everybody else of the fleet."""

    def __init__(self, fleet: Fleet, engines: Callable[[], Awaitable[Handles]]) -> None:
        self._fleet, self._engines = fleet, engines

    async def present(self, role: str, stage: str | None = None) -> Handles:
        return await (self._engines() if role == "rollout" else self._fleet.present(role, stage))

    def first_stage(self, role: str) -> str | None:
        return self._fleet.first_stage(role)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is not reported yet."""

    step: int
    engines: Handles
    are_lent: bool
    is_kept: bool = False
    """True if nodes keep the publication of its version."""


Report = Callable[[int, Mapping[str, float], float], None]


class Evaluations:
    """Lifecycle: `start` in the controller's task group, `resume` in a run that continues; for each step
    `before_load`, and `begin` where it is due; `finish` at the end of the run."""

    def __init__(
        self,
        context: RunContext,
        evaluator: Evaluator | None,
        loans: EngineLoans,
        weights: WeightSync,
        saving: CheckpointWriter,
        report: Report,
        is_preempted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`report`: called with a step, what was measured of it, empty if that is lost, and the seconds.
        `is_preempted`: returns whether the run is to end soon, which waits for no evaluation."""
        self._config, self._fleet, self._directory = context.config, context.fleet, context.directory
        self._are_beside = context.config.evaluates_beside and bool(context.flow.of_kind("rollout"))
        self._note = context.progress.note
        first, end = self._config.rollout.least_workers, self._config.num_engines
        self._own = [f"Rollout-{index}" for index in range(first, end)] if self._are_beside else []
        """Names of the engines that sample for evaluations alone."""
        self._evaluator, self._loans, self._report = evaluator, loans, report
        self._weights, self._saving = weights, saving
        self._is_preempted = is_preempted
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None
        self._owed: list[Evaluation] = []
        """Evaluations that have begun and are not reported, in the order in which they are measured."""
        self._engine_s: float | None = None
        self._begun = 0.0
        """Time at which the last evaluation began, or ended before the first step, by the event loop's clock."""
        self.num_lost = 0

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Say where evaluations run beside training, if they do."""
        self._tasks, self._begun = tasks, _now_s()
        if self.is_beside(0) and len(engines := self._fleet.role("rollout")) == 1:
            self._note(
                f"{engines[0][0]} samples and evaluates: the version after one that is evaluated waits until that is "
                "done. rollout.num_workers=2 lets one sample on meanwhile."
            )

    async def reserve(self) -> None:
        """Take the engines that are evaluations' own out of their role, also those in the places of lost ones."""
        if self._own:
            self._fleet.reserve(self._own)
            await self._loans.take(self._own)

    def is_beside(self, step: int) -> bool:
        """Return whether evaluations after this step run beside training. After the last one there is nothing to
        train."""
        return self._evaluator is not None and self._are_beside and step < self._config.trainer.max_steps

    @property
    def awaited(self) -> list[int]:
        """Steps whose evaluations have begun and have no result yet."""
        return [one.step for one in self._owed]

    def measured_before(self, seconds: float) -> None:
        """Note an evaluation by all engines, before the first step."""
        self._engine_s = seconds * max(1, len(self._fleet.role("rollout")))
        self._begun = _now_s()

    async def begin(self, step: int) -> None:
        """Begin to measure the version of a step, which all engines have. Waits for the evaluation before."""
        until_next_s = _now_s() - self._begun
        await self._ended()
        self._begun = _now_s()
        await self._start(await self._evaluation_of(step, until_next_s))

    async def _evaluation_of(self, step: int, until_next_s: float) -> Evaluation:
        """The evaluation of the version that all engines have, with those that are to measure it."""
        if own := await self._updated_own():
            return Evaluation(step, own, are_lent=True)
        engines = self._fleet.role("rollout")
        # Where engines finish their sequences one by one before they load, one of those left is to sample meanwhile.
        num_others = len(engines) - 1 if self._config.finishes_sequences and len(engines) > 2 else len(engines)
        number = engines_to_lend(self._config.evaluation.share, num_others, self._engine_s, until_next_s)
        lent = await self._loans.take([name for name, _ in engines[len(engines) - number :]]) if number else []
        return Evaluation(step, lent or engines, are_lent=bool(lent))

    async def _updated_own(self) -> Handles:
        """Evaluations' own engines that are there, with the newest version."""
        await self.reserve()
        return await self._loans.catch_up([one for one in self._fleet.lent() if one[0] in self._own])

    async def _start(self, *evaluations: Evaluation) -> None:
        """Begin evaluations: first that of an engine which is to load the next version, last those of versions that no
        engine has. Nodes keep the first of these, before another version is written."""
        assert self._tasks is not None
        await self._ended()
        self._owed = sorted(evaluations, key=lambda one: (not one.engines, one.are_lent))
        first = next((one for one in self._owed if not one.engines), self._owed[0])
        if first.are_lent:
            await self._weights.keep(first.step)
        self._running = self._tasks.create_task(held_back(self._run_all()))

    async def _run_all(self) -> None:
        while self._owed:
            now, *later = self._owed
            if now.are_lent and (not now.engines or all(one.engines for one in later)):
                now = replace(now, is_kept=await self._weights.keep(now.step))
            await self._run(now)
        await self._weights.keep(None)

    async def resume(self, done: int, newest: int) -> None:
        """Begin what a run that continues lacks up to step `done`: engines that are lent measure again what another
        command had lent them for; without one, another loads the version. `newest`: the version of all others."""
        lent, missing = self._fleet.lent(), self._missing(done)
        versions = await try_all(lent, "version", phase="evaluation", timeout_s=PRESENT_S)
        await self._give_back([one for one, version in zip(lent, versions, strict=True) if version not in missing])
        for step in missing:
            self._saving.await_score(step)
        owed = list[Evaluation]()
        if newest in missing and newest not in versions:
            owed = [await self._evaluation_of(newest, 0.0)]
            missing.remove(newest)
        busy = [engine for one in owed for engine in one.engines]  # own ones have the newest now, whatever they had
        for step in missing:
            engines = [one for one, version in zip(lent, versions, strict=True) if version == step and one not in busy]
            owed.append(Evaluation(step, engines, are_lent=True))
        if owed:
            await self._start(*owed)

    def _missing(self, done: int) -> list[int]:
        """Steps up to `done` whose evaluations were to run beside training, and are neither reported nor lost. Those
        before the first one that is reported were not asked for."""
        if not self.is_beside(0):
            return []
        known = {int(line["step"]) for line in self._directory.read_metrics() if HELDOUT in line}
        first = min(known, default=done)
        known |= steps_lost(self._directory.read_events())
        return [step for step in range(first, done + 1) if self._config.evaluates(step) and step not in known]

    async def before_load(self) -> None:
        """Wait until no engine that is to load the next version evaluates."""
        if not all(one.are_lent for one in self._owed):
            await self._ended()

    async def finish(self, *, is_preempted: bool = False) -> None:
        """Wait for the evaluation that runs; one that takes longer than a group may is lost. A run that is preempted
        waits for none: the one that goes on measures again what it can."""
        if self._running is None:
            return
        timeout_s = 0.0 if is_preempted else self._config.rollout.generate_timeout_s
        await asyncio.wait([self._running], timeout=timeout_s)
        if not self._running.done():
            self._running.cancel()
            await asyncio.wait([self._running])
            for now in [] if is_preempted else self._owed:
                self._lose(now, DeadlineExceeded(f"it was not done {timeout_s:g} s after the last step."))

    async def _ended(self) -> None:
        if (running := self._running) is None:
            return
        while (await asyncio.wait([running], timeout=LOOK_S))[1]:  # what it fails with is its own task's
            if self._is_preempted():
                running.cancel()

    async def _run(self, now: Evaluation) -> None:
        assert self._evaluator is not None
        engines = list(await self._loans.drain(now.engines) if now.are_lent else now.engines)
        began, began_s = time.time(), _now_s()
        fleet: Any = Measuring(self._fleet, lambda: self._present(now, engines))
        try:
            found = await self._evaluator.measure(fleet)
        except PenstockError as error:
            if not (is_recoverable(error) or isinstance(error, WeightError)):
                raise
            self._lose(now, error)
        else:
            seconds = _now_s() - began_s
            self._engine_s = seconds * len(engines)
            self._directory.timeline.span("engines", "evaluate", began, time.time(), step=now.step)
            self._report(now.step, found, seconds)
        self._owed = [one for one in self._owed if one.step != now.step]
        if now.are_lent:
            await self._give_back(engines)

    async def _give_back(self, engines: Handles) -> None:
        await self._loans.give_back([one for one in engines if one[0] not in self._own])

    async def _present(self, now: Evaluation, lent: list[tuple[str, Any]]) -> Handles:
        """Engines of the evaluation that are there, and have its version; where none of those that were lent is left,
        another one, which is added to them. Raises `WorkerDied`, `DeadlineExceeded`, `WeightError`."""
        engines = lent if now.are_lent else await self._fleet.present("rollout")
        heard = await try_all(engines, "version", phase="evaluation", timeout_s=PRESENT_S)
        found = [one for one, version in zip(engines, heard, strict=True) if version == now.step]
        if not now.are_lent:
            if not found:
                raise WorkerDied(f"no engine of the evaluation has version {now.step} any more.")
            return found
        dead = [one for one, version in zip(engines, heard, strict=True) if isinstance(version, Exception)]
        self._loans.end(dead)
        lent[:] = [one for one in lent if one not in dead]
        if not found:
            found = [await self._lend_another(now)]
            lent += found
        return found

    async def _lend_another(self, now: Evaluation) -> tuple[str, Any]:
        """Lend one more engine, which has loaded the version. Raises `WeightError` where that cannot be, and
        `WorkerDied` where it may be with another."""
        if not (now.is_kept or await self._saving.has(now.step)):
            raise WeightError(f"no engine has version {now.step} any more, and there is no checkpoint of it.")
        if (engine := await self._lend_idle()) is None:
            raise WeightError(f"no engine has version {now.step} any more, and none was there in time to load it.")
        try:
            if await self._load_again(now, engine):
                return engine
        except (PenstockError, OSError) as error:
            await self._give_back([engine])
            raise WeightError(f"version {now.step} cannot be loaded again: {error}") from error
        raise WorkerDied(f"{engine[0]} was lost as it loaded version {now.step} again.")

    async def _lend_idle(self) -> tuple[str, Any] | None:
        """An engine that is lent and holds nothing: one of evaluations' own, or one of several that sample, once it or
        its replacement is there. None: not within `rollout.engine_start_s`."""
        least = 2 if len(self._fleet.teams("rollout")) > 1 else 1
        give_up = _now_s() + self._config.rollout.engine_start_s
        while _now_s() < give_up:
            names = self._own
            if not self._own and len(serving := self._fleet.role("rollout")) >= least:
                names = [serving[-1][0]]
                await self._loans.drain(await self._loans.take(names))
            if found := [one for one in self._fleet.lent() if one[0] in names]:
                return found[0]
            await asyncio.sleep(LOOK_S)
        return None

    async def _load_again(self, now: Evaluation, engine: tuple[str, Any]) -> bool:
        """Have an engine load the version: what its node keeps, else what is made of its checkpoint. False: it was
        lost. Raises what would fail again."""
        with contextlib.suppress(WeightError):
            if now.is_kept:
                return await self._loans.has_loaded(engine, partial(self._weights.load_kept, now.step))
        if not await self._saving.has(now.step):
            raise WeightError("there is no checkpoint of it.")

        def publish(root: str) -> Publication:
            made = publish_checkpoint(self._saving.directory(now.step), root, now.step)
            return replace(made, directory=self._fleet.provided(made.directory, [engine])[engine[0]])

        with tempfile.TemporaryDirectory(prefix="penstock-evaluation-", ignore_cleanup_errors=True) as root:
            making, timeout_s = asyncio.to_thread(publish, root), self._config.checkpoint.timeout_s
            made = await answer(making, name="its checkpoint", phase=f"make version {now.step}", timeout_s=timeout_s)
            return await self._loans.has_loaded(engine, partial(self._weights.load_older, made))

    def _lose(self, now: Evaluation, error: PenstockError) -> None:
        self.num_lost += 1
        self._directory.event(EVENT, step=now.step, error=type(error).__name__, message=str(error))
        self._note(f"the evaluation after step {now.step} is lost: {error}")
        self._report(now.step, {}, 0.0)


def steps_lost(events: Iterable[Mapping[str, Any]]) -> set[int]:
    """Steps whose evaluations were lost, by a run's events; a step that the run has gone back behind is made anew.

    >>> lost = [{"kind": EVENT, "step": step} for step in (2, 4)]
    >>> steps_lost(lost), steps_lost([*lost, {"kind": "returned", "step": 3}])
    ({2, 4}, {2})
    """
    lost = set[int]()
    for event in events:
        if event["kind"] == EVENT:
            lost.add(int(event["step"]))
        elif event["kind"] in ("returned", "resume"):
            lost = {step for step in lost if step <= int(event["step"])}
    return lost


def _now_s() -> float:
    return asyncio.get_running_loop().time()
