"""Numbers of series: Prometheus keeps each for weeks."""

from pathlib import Path

import pytest

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.tracking import RAY_METRICS
from penstock.metering.meters import SUMMARY, Meters
from penstock.metering.table import METRICS, STEP_MISMATCH
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.sinks import gauge_of
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.store_stats import StoreMeter
from penstock.store.spec import StoreSpec
from penstock.workers.trainer.step_meter import ModelSize, StepMeter
from tests.metering.measured import measured
from tests.workers.trainer.test_step_meter import Rows, report

RECIPES = sorted(file.parent.name for file in (Path(__file__).parents[2] / "recipes").glob("*/recipe.yaml"))
MOST_OF_RUN, MOST_OF_ACTOR = 60, 12
VALUES = {"phase": 2, "outcome": 4, "reason": 1, "member_role": 1}
"""Values that labels have in a run; of reasons and roles, one without great trouble."""


def declared(role: str) -> int:
    """Series of one actor of a role."""
    return sum((2 if one.kind == SUMMARY else 1) * VALUES.get("".join(one.labels), 1) for one in METRICS[role])


def test_a_rank_has_few_series() -> None:
    meters = Meters()
    meter = StepMeter(meters, ModelSize(1000, 2, 10))
    meter.begin()
    for _ in range(3):
        meter.note(report(), Rows())  # type: ignore[arg-type]
    assert len(measured(meters)) + len({"mfu, on a GPU"}) <= MOST_OF_ACTOR


def test_an_engine_has_few_series() -> None:
    assert declared("rollout") <= MOST_OF_ACTOR


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_has_few_series_besides_its_ranks(recipe: str) -> None:
    config = load_config([f"recipe={recipe}"])
    ledger, meters = Ledger(StoreSpec.of(dataflow_of(config), config)), Meters()
    meter = StoreMeter(ledger, meters)
    ledger.counters.update({"dropped/stale": 1, "staleness/0": 1})
    meter.look()
    for stage in ledger.residents.readiness.stages:
        meter.waited(stage.name, 1.0)
    scores = declared("environment") if config.environment.name else declared("reward") * config.reward.num_workers
    others = declared("rollout") + scores + len(RAY_METRICS) + declared("driver") - len({STEP_MISMATCH})
    assert len(measured(meters)) + others <= MOST_OF_RUN


def test_the_alert_about_a_step_has_its_gauge() -> None:
    assert STEP_MISMATCH.name in {gauge_of(name)[0] for name in RAY_METRICS}
