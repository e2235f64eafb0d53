"""A run's dataflow on a virtual clock: its members and their events, from a configuration to an outcome.

    config ─▶ Dataflow, StoreSpec, actors ─▶ SimulatedStore, SimulatedEngines, SimulatedTrainer, … ─▶ Simulated

What the store decides is decided by the run's own ledger, admission, rounds, shares and stragglers; nothing of it is
modelled. Not simulated: evaluation, checkpoints, what calls and rows cost on their way, the turns of environments (an
attempt is one response), the length of what a filter drops (any unit may be dropped).
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.resolved import resolve
from penstock.planner.costs.processors import Cores
from penstock.planner.durations import Durations
from penstock.planner.simulation.engines import Changes, Sampling, SimulatedEngines
from penstock.planner.simulation.events import Clock, SimulatedStore
from penstock.planner.simulation.members import (
    Samples,
    ScorerTeam,
    SimulatedPrompts,
    StageActor,
    StageResults,
)
from penstock.planner.simulation.result import Account, Simulated
from penstock.planner.simulation.trainer import SimulatedTrainer
from penstock.store.service.work_log import WorkLog
from penstock.store.spec import StageSpec, StoreSpec

NEVER_S = 1e12
"""Time after which leases run out: whoever lives renews its own."""
MOST_EVENTS = 20_000_000
"""Most events of one step: a hundred times those of 100,000 samples."""
ROLLOUT, GREEDY = "rollout", "greedy_rollout"


class SimulationStuck(PenstockError):
    """A simulated run that gets no further."""


@dataclass
class Simulation:
    """Lifecycle: made of a configuration, `run` once.

    Simulation(load_config(["recipe=arithmetic"]), ConstantDurations(), Samples(lambda group, sample: 100)).run()
    """

    config: RunConfig
    durations: Durations
    samples: Samples
    changes: Changes = field(default_factory=Changes)
    engine_durations: Sequence[Durations] = ()
    """Durations of each engine, where engines differ; empty: `durations` are every engine's."""
    cores: Cores | None = None
    """Cores that engines and ranks share; None: each has its own device."""
    epoch_s: float | None = None
    """Time of the run's begin in seconds since the epoch, for a log of who works on what; None: none is kept."""

    def __post_init__(self) -> None:
        config, trainer = self.config, self.config.trainer
        run = resolve(config)
        self.flow, self.plan = run.flow, run.plan
        spec = replace(StoreSpec.of(self.flow, config, strict=True), lease_timeout_s=NEVER_S)
        self.clock, random = Clock(), Random(config.seed)
        epoch_s = self.epoch_s
        self.log = WorkLog(lambda: epoch_s + self.clock.now) if epoch_s is not None else None
        self.store = SimulatedStore(spec, self.clock, self.log)
        self.num_shares = trainer.num_ranks // (trainer.tensor_parallel_size * trainer.sequence_parallel_size)
        self.engines = self._made_engines(random) if self.flow.of_kind(ROLLOUT) else None
        self.trainer = SimulatedTrainer(
            trainer.max_steps, trainer.num_ranks, self.num_shares, config.max_staleness == 0,
            self.store, self.clock, self.durations, self.engines,
        )  # fmt: skip
        self.trainer.lose_ranks_at_random(self.changes, random)
        brings = "response_ids" in (column.name for column in self.flow.stage("source").writes)
        SimulatedPrompts(self.store, self.samples, brings)
        self.actors = [actor for stage in spec.stages for actor in self._made_actors(stage, random)]
        num_first = config.max_staleness + 1 if self.engines is not None else 0
        self.account = Account(self.store, self.clock, self.engines, trainer.max_steps, num_first)
        self.trainer.watchers.append(self.account)

    def run(self) -> Simulated:
        """Play all steps. Raises `SimulationStuck`."""
        with _few_collections():
            self._play()
        return self.account.result()

    def _play(self) -> None:
        if self.engines is not None:
            self.engines.begin()
        for actor in self.actors:
            actor.ask()
        self.store.settle()
        clock, trainer, step, last = self.clock, self.trainer, 0, MOST_EVENTS
        while not trainer.is_over:
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

    def _made_engines(self, random: Random) -> SimulatedEngines:
        config, size = self.config, self.flow.samples_per_prompt
        stages = [stage for kind in (ROLLOUT, GREEDY) for stage in self.flow.of_kind(kind)]
        sampling = Sampling(
            tuple(stage.name for stage in stages),
            {stage.name: tuple(column.name for column in stage.writes) for stage in stages},
            max(1, config.rollout.max_concurrent_samples // size),
        )
        return SimulatedEngines(
            self.engine_durations or [self.durations] * config.rollout.least_workers, sampling, self.store,
            self.clock, self.samples, self.changes, random,
        )  # fmt: skip

    def _made_actors(self, spec: StageSpec, random: Random) -> list[StageActor]:
        """Make the actors that serve a stage, besides engines and the trainer's ranks."""
        stage = self.flow.stage(spec.name)
        if stage.kind in (ROLLOUT, GREEDY, "train"):
            return []
        reason = stage.reason if stage.kind == "filter" else ""
        results = StageResults(self.store, spec, self.samples, reason, random)
        names = [actor.name for actor in self.plan if actor.stage == spec.name]
        if stage.kind in ("logprobs", "scores"):
            ScorerTeam(names, spec.name, self.store, self.clock, self.durations, results, self.num_shares)
            return []
        return [StageActor(name, spec.name, self.store, self.clock, self.durations, results) for name in names]


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


def simulate(config: RunConfig, durations: Durations, samples: Samples, changes: Changes | None = None) -> Simulated:
    """Play a run and return its outcome. `config`: as of a run; its `trainer.max_steps` are played. Raises what a run's
    configuration can be wrong with, `SimulationStuck`."""
    return Simulation(config, durations, samples, changes or Changes()).run()
