"""Small simulated runs, whose durations are easy to add up."""

from copy import deepcopy
from dataclasses import replace
from functools import cache, reduce
from typing import Any

from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner.durations import ConstantDurations, SyncSeconds
from penstock.planner.simulation.engines import FleetChanges
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.planner.simulation.simulation import Simulation, SimulationResult
from tests.store.invariants import check_invariants

TEN = SimulatedSamples(lambda group, sample: 10, prompt_tokens=5)
EASY = ConstantDurations(
    prefill_tokens_per_s=10.0, decode={1: 0.11, 2: 0.12}, update_tokens_per_s=30.0, synced=SyncSeconds(1.5, 0.5, 0.25)
)
"""Half a second a prompt of five tokens, 0.1 s and 0.01 s a sequence for a decode step, half a second for each row of
ten tokens, and five of its prompt, to be trained."""


def config_of(*words: str, **changes: Any) -> RunConfig:
    """A run of three steps of four groups of two samples, by two engines and two ranks. Sequences keep their caches, so
    that nothing is read twice."""
    keys: dict[str, Any] = {
        "algorithm.group_size": 2, "trainer.groups_per_step": 4, "trainer.max_steps": 3, "trainer.num_ranks": 2,
        "rollout.num_workers": 2, "rollout.max_concurrent_samples": 64, "max_staleness": 0,
        "rollout.on_update": "keep", **changes,
    }  # fmt: skip
    config = deepcopy(_loaded(words))
    for key, value in keys.items():
        *path, name = key.split(".")
        setattr(reduce(getattr, path, config), name, value)
    return config


@cache
def _loaded(words: tuple[str, ...]) -> RunConfig:
    return load_config(["recipe=arithmetic", *words])


def played(simulation: Simulation) -> SimulationResult:
    """Play a run, and see that the ledger holds what it keeps by counting, and has trained each group once."""
    found = simulation.run()
    ledger, config = simulation.store.ledger, simulation.config
    check_invariants(ledger)
    assert ledger.rounds.formed == config.trainer.max_steps
    rows = config.trainer.max_steps * config.trainer.groups_per_step * ledger.residents.size
    assert ledger.counters["rows_trained"] == rows
    assert sum(found.staleness.values()) == rows
    assert max(found.staleness, default=0) <= config.max_staleness
    for shares in (found.engines, found.ranks):
        assert not shares or abs(sum(shares.values()) - 1) < 1e-9
    return found


def play(
    config: RunConfig, durations: ConstantDurations = EASY, samples: SimulatedSamples = TEN, **more: Any
) -> SimulationResult:
    return played(Simulation(config, durations, samples, **more))


def with_stages(**seconds: float) -> ConstantDurations:
    return replace(EASY, stages=seconds)


FAULTS = FleetChanges(mean_s=40.0, replaced_s=7.0)
