"""A run's dataflow on a virtual clock: its members and their events, from a configuration to an outcome.

    config ─▶ Dataflow, StoreSpec, actors ─▶ SimulatedStore, SimulatedEngines, SimulatedTrainer, … ─▶ SimulationResult

What the store decides is decided by the run's own ledger, admission, rounds, shares and stragglers; nothing of it is
modelled. Evaluation is played where it is asked for. Not simulated: checkpoints, what calls and rows cost on their way,
the turns of environments (an attempt is one response), the length of what a filter drops (any unit may be dropped).

The outcome says how long a step takes, who was busy, and what each side waited for. The first `max_staleness + 1` steps
fill the pipeline. They are left out of rates and shares where there are others.
"""

import contextlib
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.resolved import resolve
from penstock.planner.durations import Durations
from penstock.planner.processors import Cores
from penstock.planner.simulation.engines import EngineSeconds, FleetChanges, SimulatedEngines
from penstock.planner.simulation.events import Clock, SimulatedStore
from penstock.planner.simulation.simulated_evaluation import EvaluationPlan, EvaluationTimes, SimulatedEvaluation
from penstock.planner.simulation.simulated_members import (
    ScorerTeam,
    SimulatedPrompts,
    SimulatedSamples,
    StageActor,
    StageResults,
)
from penstock.planner.simulation.simulated_trainer import PROMPTS, SimulatedStep, SimulatedTrainer
from penstock.store.service.work_log import WorkLog
from penstock.store.spec import StageSpec, StoreSpec

UPDATE, SYNC, TURN = "updating", "waiting for the weight sync", "changing turns"
NEVER_S = 1e12
"""Time after which leases run out: whoever lives renews its own."""
MOST_EVENTS = 20_000_000
"""Most events of one step: a hundred times those of 100,000 samples."""
ROLLOUT, GREEDY = "rollout", "greedy_rollout"


@dataclass(frozen=True)
class SimulationResult:
    """The outcome of a simulated run."""

    num_steps: int
    seconds: float
    """Seconds of the whole run."""
    step_s: float
    """Mean seconds of a step, once the pipeline is full."""
    tokens_per_s: float
    """Sampled tokens that were trained, a second."""
    samples_per_s: float
    engines: Mapping[str, float]
    """Shares of the engines' time, by what they did; they sum to 1. Empty without engines."""
    ranks: Mapping[str, float]
    """Shares of the ranks' time, by what they did or waited for; they sum to 1."""
    staleness: Mapping[int, int]
    """Rows that were trained, by the staleness of their oldest token."""
    staleness_mean: float
    """Mean staleness of all tokens, in versions."""
    dropped: Mapping[str, int]
    """Rows that were dropped, by reason."""
    num_faults: int
    num_events: int
    steps_s: tuple[float, ...] = ()
    """Seconds of each step, from the end of the one before to its own."""
    evaluations: tuple[EvaluationTimes, ...] = ()


class ResultCounter:
    """A watcher that counts. Lifecycle: told of each step; `result` once the run is over."""

    def __init__(self, store: SimulatedStore, engines: SimulatedEngines | None, num_steps: int, num_first: int) -> None:
        """`num_first`: steps that fill the pipeline."""
        self._store, self._clock, self._engines, self._num_steps = store, store.clock, engines, num_steps
        self._num_first = num_first if num_first < num_steps else 0
        self._began, self._before = 0.0, EngineSeconds()
        """Seconds after which the steps that count began, and what engines had done until then."""
        self._ended: list[float] = []
        self._ranks: dict[str, float] = defaultdict(float)
        self._tokens = self._rows = 0
        self._staleness: Counter[int] = Counter()
        self._staleness_sum = self._all_tokens = 0

    def trained(self, step: SimulatedStep) -> None:
        groups, size = self._store.ledger.residents.groups, self._store.ledger.residents.size
        notes = self._store.notes
        version, tokens, rows = step.step - 1, 0, sum(map(len, step.parts))
        for number in {row // size for part in step.parts for row in part}:
            group = groups[number]
            of_group = sum(group.of_live(group.response_tokens))
            tokens += of_group
            if sums := notes[number].version_sums:
                self._staleness_sum += version * of_group - sum(group.of_live(sums))
                self._staleness.update(version - oldest for oldest in group.of_live(group.oldest))
        self._all_tokens += tokens
        if step.step > self._num_first:
            self._tokens += tokens
            self._rows += rows

    def closed(self, step: SimulatedStep) -> None:
        if step.step > self._num_first:
            phases = {f"waiting for {stage}": seconds for stage, seconds in step.waits.items()} | {
                TURN: step.taken - step.formed,
                UPDATE: step.updated - step.taken,
                SYNC: step.closed - step.updated,
            }
            for what, seconds in phases.items():
                if seconds > 0:
                    self._ranks[what] += seconds

    def served(self, step: SimulatedStep) -> None:
        self._ended.append(self._clock.passed_s)
        if step.step == self._num_first:
            self._began = self._clock.passed_s
            self._before = self._engines.seconds() if self._engines is not None else EngineSeconds()

    def result(self) -> SimulationResult:
        seconds = self._ended[-1] - self._began
        counters = self._store.ledger.counters
        ends = [0.0, *self._ended]
        shares = sum(self._ranks.values())
        return SimulationResult(
            num_steps=self._num_steps,
            seconds=self._ended[-1],
            step_s=seconds / (self._num_steps - self._num_first),
            tokens_per_s=self._tokens / seconds if seconds else 0.0,
            samples_per_s=self._rows / seconds if seconds else 0.0,
            engines=self._engine_shares(),
            ranks={what: value / shares for what, value in sorted(self._ranks.items(), key=lambda one: -one[1])},
            staleness=dict(sorted(self._staleness.items())),
            staleness_mean=self._staleness_sum / self._all_tokens if self._all_tokens else 0.0,
            dropped={name.partition("/")[2]: n for name, n in counters.items() if name.startswith("dropped/")},
            num_faults=self._engines.num_lost if self._engines is not None else 0,
            num_events=self._clock.num_events,
            steps_s=tuple(after - before for before, after in pairwise(ends)),
        )

    def _engine_shares(self) -> dict[str, float]:
        if self._engines is None:
            return {}
        now, before = self._engines.seconds(), self._before
        there = now.there - before.there
        busy = {
            "decoding": now.decoding - before.decoding,
            "reading prompts": now.reading - before.reading,
            "loading weights": now.loading - before.loading,
        }
        busy[f"waiting for {PROMPTS}"] = max(0.0, there - sum(busy.values()))
        return {what: seconds / there for what, seconds in busy.items()} if there else {}


class SimulationStuck(PenstockError):
    """A simulated run that gets no further."""


@dataclass
class Simulation:
    """Lifecycle: made of a configuration, `run` once.

    samples = SimulatedSamples(lambda group, sample: 100)
    Simulation(load_config(["recipe=arithmetic"]), ConstantDurations(), samples).run()
    """

    config: RunConfig
    durations: Durations
    samples: SimulatedSamples
    changes: FleetChanges = field(default_factory=FleetChanges)
    engine_durations: Sequence[Durations] = ()
    """Durations of each engine, where engines differ; empty: `durations` are every engine's."""
    cores: Cores | None = None
    """Cores that engines and ranks share; None: each has its own device."""
    epoch_s: float | None = None
    """Time of the run's begin in seconds since the epoch, for a log of who works on what; None: none is kept."""
    evaluation: EvaluationPlan | None = None
    """None: nothing is evaluated."""

    def __post_init__(self) -> None:
        config, run = self.config, resolve(self.config)
        self.flow, self.plan = run.flow, run.plan
        spec = replace(StoreSpec.of(self.flow, config, strict=True), lease_timeout_s=NEVER_S)
        self.clock, random = Clock(), Random(config.seed)
        epoch_s = self.epoch_s
        self.log = WorkLog(lambda: epoch_s + self.clock.now) if epoch_s is not None else None
        self.store = SimulatedStore(spec, self.clock, self.log)
        self.engines = self._make_engines(random) if self.flow.of_kind(ROLLOUT) else None
        self.trainer = SimulatedTrainer(config, self.store, self.durations, self.engines)
        self.evaluated = self._make_evaluation()
        self.trainer.lose_ranks_at_random(self.changes, random)
        brings = "response_ids" in (column.name for column in self.flow.stage("source").writes)
        SimulatedPrompts(self.store, self.samples, brings)
        self.actors = [actor for stage in spec.stages for actor in self._make_actors(stage, random)]
        num_first = config.max_staleness + 1 if self.engines is not None else 0
        self.account = ResultCounter(self.store, self.engines, config.trainer.max_steps, num_first)
        self.trainer.watchers.append(self.account)

    def run(self) -> SimulationResult:
        """Play all steps. Raises `SimulationStuck`."""
        with _few_collections():
            self._play()
        evaluations = tuple(self.evaluated.times) if self.evaluated is not None else ()
        return replace(self.account.result(), evaluations=evaluations)

    def _play(self) -> None:
        if self.engines is not None:
            self.engines.begin()
        for actor in self.actors:
            actor.ask()
        self.store.settle()
        clock, trainer, step, last = self.clock, self.trainer, 0, MOST_EVENTS
        while not trainer.is_over or (self.evaluated is not None and not self.evaluated.is_over):
            if trainer.num_served > step:
                step, last = trainer.num_served, clock.num_events + MOST_EVENTS
            if not clock.step() or clock.num_events > last:
                raise SimulationStuck(
                    f"step {step + 1} has not ended after {clock.now:.0f} s and {clock.num_events:,} events. Are "
                    "members lost before they finish anything, or is nearly everything dropped? Change --faults or "
                    "--dropped."
                )
            self.store.settle()
            if self.cores is not None:
                busy = sum(engine.is_busy for engine in self.engines.there.values()) if self.engines else 0
                clock.pace = self.cores.pace(busy, trainer.num_working)

    def _make_engines(self, random: Random) -> SimulatedEngines:
        rollout, stages = self.config.rollout, [*self.flow.of_kind(ROLLOUT), *self.flow.of_kind(GREEDY)]
        durations = self.engine_durations or [self.durations] * rollout.least_workers
        columns = {stage.name: tuple(column.name for column in stage.writes) for stage in stages}
        max_groups = max(1, rollout.max_concurrent_samples // self.flow.samples_per_prompt)
        mode = rollout.update_mode if self.config.max_staleness else "keep"
        return SimulatedEngines(durations, columns, max_groups, self.store, self.samples, self.changes, random, mode)

    def _make_evaluation(self) -> SimulatedEvaluation | None:
        """Put evaluation between the trainer and the engines."""
        if self.evaluation is None or self.engines is None:
            return None
        durations = self.engine_durations[-1] if self.engine_durations else self.durations
        found = SimulatedEvaluation(
            self.evaluation, self.engines, durations, self.samples, self.clock,
            self.config.rollout.max_concurrent_samples, self.config.trainer.max_steps,
        )  # fmt: skip
        self.trainer.load = found.load
        return found

    def _make_actors(self, spec: StageSpec, random: Random) -> list[StageActor]:
        """Make the actors that serve a stage, besides engines and the trainer's ranks."""
        stage = self.flow.stage(spec.name)
        if stage.kind in (ROLLOUT, GREEDY, "train"):
            return []
        reason = stage.reason if stage.kind == "filter" else ""
        results = StageResults(self.store, spec, self.samples, reason, random)
        names = [actor.name for actor in self.plan if actor.stage == spec.name]
        if stage.kind in ("logprobs", "scores"):
            ScorerTeam(names[0], results, self.durations, self.config.trainer.of_scorer(stage.name).num_shares)
            return []
        return [StageActor(name, results, self.durations) for name in names]


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Keep Python's collector from walking over all that was imported again and again: events make few cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def simulate(
    config: RunConfig, durations: Durations, samples: SimulatedSamples, changes: FleetChanges | None = None
) -> SimulationResult:
    """Play a run and return its outcome. `config`: as of a run; its `trainer.max_steps` are played. Raises what a run's
    configuration can be wrong with, `SimulationStuck`."""
    return Simulation(config, durations, samples, changes or FleetChanges()).run()
