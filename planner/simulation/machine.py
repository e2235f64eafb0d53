"""A machine without GPUs: what a run of ten steps there says of every other split of its cores.

    a run's records ─▶ costs on one thread ─▶ each split played on its cores ─▶ the fastest, as a table and as overrides

What costs leave out is common to all splits: they are scaled until the run's own split takes as long as it did.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.calibration import Pilot
from penstock.planner.candidates import with_keys
from penstock.planner.processors import NOTHING, ProcessorCosts, ProcessorDurations, read_costs
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.planner.simulation.simulation import Simulation, SimulationResult

STEPS = 40
"""Steps that are played of each split: the lengths of ten batches are still luck."""
MOST_ROWS = 8
Keys = dict[str, int]


@dataclass(frozen=True)
class CpuMachine:
    """A machine's cores, and a run on them."""

    num_cores: int
    pilot: Pilot
    base: RunConfig
    """A run whose split is asked for; the pilot's differs from it in its split alone."""

    @classmethod
    def here(cls, pilot: Pilot, base: RunConfig) -> "CpuMachine":
        return cls(len(os.sched_getaffinity(0)), pilot, base)

    @cached_property
    def costs(self) -> ProcessorCosts:
        """Seconds on one thread, by which the pilot's own split takes as long as it did. Raises `ConfigError`."""
        own = with_keys(self.base, self.pilot.keys)
        try:
            found = read_costs(RunDirectory.open(Path(self.pilot.place)), self.durations(own, NOTHING))
        except ValueError as error:
            raise ConfigError(
                f"--from {self.pilot.place}: {error}. Let it make ten steps with tracking.samples_every_steps=1."
            ) from None
        return found.scaled(self.pilot.step_s / self.simulate_split(own, found).step_s)

    def durations(self, config: RunConfig, costs: ProcessorCosts | None = None) -> ProcessorDurations:
        """The durations of a split. `costs`: None: those of the pilot."""
        return ProcessorDurations(costs or self.costs, config, self.num_cores, self.pilot.lengths.prompt)

    def simulate_split(self, config: RunConfig, costs: ProcessorCosts | None = None) -> SimulationResult:
        """Play a split. `costs`: None: those of the pilot."""
        shortened = replace(config, trainer=replace(config.trainer, max_steps=STEPS))
        durations, lengths = self.durations(shortened, costs), self.pilot.lengths
        samples = SimulatedSamples(partial(lengths.of, seed=config.seed), lengths.prompt)
        return Simulation(shortened, durations, samples, cores=durations.cores()).run()

    def splits(self) -> Iterator[Keys]:
        """Splits that are worth playing: no side alone asks for more threads than there are cores."""
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= self.num_cores]
        sides = [(count, threads) for count, threads in product(sizes, sizes) if count * threads <= self.num_cores]
        for (engines, of_engine), (ranks, of_rank) in product(sides, sides):
            if ranks > self.base.trainer.groups_per_step * self.base.algorithm.group_size:
                continue
            for staleness in range(self.base.max_staleness + 1):
                yield {
                    "max_staleness": staleness, "rollout.num_workers": engines, "rollout.num_threads": of_engine,
                    "trainer.num_ranks": ranks, "trainer.num_threads": of_rank,
                }  # fmt: skip

    def best(self) -> list[tuple[SimulationResult, Keys]]:
        """All splits with what they were played to be, fastest first; of equal ones that with fewer members."""
        found = [(self.simulate_split(with_keys(self.base, keys)), keys) for keys in self.splits()]
        return sorted(found, key=lambda one: (round(one[0].step_s, 3), sum(one[1].values())))


def show(machine: CpuMachine, console: Console, overrides: Sequence[str]) -> list[str]:
    """Print the best splits. `overrides`: those that the command was given. Returns all of the best one's."""
    best = machine.best()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("engines", "ranks", "steps off", "s/step", "tok/s", "engines idle", "ranks idle"):
        table.add_column(column, justify="right", no_wrap=True)
    for found, keys in best[:MOST_ROWS]:
        sides = found.engines, found.ranks
        idle = [sum(share for what, share in side.items() if what.startswith("waiting")) for side in sides]
        off, engines, of_engine, ranks, of_rank = keys.values()
        table.add_row(
            f"{engines} x {of_engine}", f"{ranks} x {of_rank}", str(off), f"{found.step_s:.2f}",
            f"{found.tokens_per_s:,.0f}", *(f"{share:.0%}" for share in idle),
        )  # fmt: skip
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    pilot = machine.pilot
    say(
        f"{len(best)} splits of {machine.num_cores} cores were played, by the records of {pilot.place}: "
        f"{pilot.step_s:.2f} s a step."
    )
    console.print(table)
    chosen = [*overrides, *(f"{key}={value}" for key, value in best[0][1].items())]
    say(f"\n{shlex.join(['penstock', 'run', *chosen])}")
    return chosen
