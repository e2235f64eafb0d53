"""A machine without GPUs: what a run of ten steps there says of every other split of its cores.

a run's records ─▶ costs on one thread ─▶ each split played on its cores ─▶ corrected by the run's own
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.planning.calibration import Pilot
from penstock.orchestrator.planning.candidates import with_keys
from penstock.orchestrator.planning.costs.processors import NOTHING, ProcessorCosts, ProcessorDurations
from penstock.orchestrator.planning.costs.recorded import read_costs
from penstock.orchestrator.planning.simulation.members import Samples
from penstock.orchestrator.planning.simulation.result import Simulated
from penstock.orchestrator.planning.simulation.simulation import Simulation
from penstock.orchestrator.run_directory.run_directory import RunDirectory

STEPS = 40
"""Steps that are played of each split: the lengths of ten batches are still luck."""


@dataclass(frozen=True)
class Machine:
    """A machine's cores, and a run on them."""

    num_cores: int
    pilot: Pilot
    base: RunConfig
    """A run whose split is asked for; the pilot's differs from it in its split alone."""

    @cached_property
    def costs(self) -> ProcessorCosts:
        """Seconds on one thread, by which the pilot's own split takes as long as it did. Raises `ConfigError`."""
        own = with_keys(self.base, self.pilot.keys)
        split = self.durations(own, NOTHING)
        try:
            found = read_costs(RunDirectory.open(Path(self.pilot.place)), split)
        except ValueError as error:
            raise ConfigError(
                f"--from {self.pilot.place}: {error}. Let it make ten steps with tracking.samples_every_steps=1."
            ) from None
        return found.scaled(self.pilot.step_s / self.played(own, found).step_s)

    def durations(self, config: RunConfig, costs: ProcessorCosts) -> ProcessorDurations:
        return ProcessorDurations(costs, config, self.num_cores, self.pilot.lengths.prompt)

    def played(self, config: RunConfig, costs: ProcessorCosts | None = None, steps: int = STEPS) -> Simulated:
        """Play a split. `costs`: None: those of the pilot."""
        config = replace(config, trainer=replace(config.trainer, max_steps=steps))
        durations = self.durations(config, costs or self.costs)
        lengths = self.pilot.lengths
        samples = Samples(partial(lengths.of, seed=config.seed), lengths.prompt)
        return Simulation(config, durations, samples, cores=durations.cores()).run()
