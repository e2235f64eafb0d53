"""The table follows Prometheus' conventions, and the document says what it says."""

import re
from pathlib import Path

import pytest

from penstock.metering import table
from penstock.metering.meters import COUNTER, GAUGE, ORIGIN, SUMMARY, Metric
from penstock.metering.table import METRICS
from penstock.orchestrator.observability.reporting.sinks import STEP_PREFIX
from penstock.workers.agents import trajectory
from penstock.workers.reward.reward_result import KINDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "monitoring.md"
ALL = [metric for metrics in METRICS.values() for metric in metrics]
SUFFIXES = {"seconds": "seconds", "bytes": "bytes", "ratio": "ratio", "FLOP/s": "flops_per_second"}
"""How a name writes a unit; others are what is counted, as it is."""


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_name_says_its_unit(metric: Metric) -> None:
    unit = SUFFIXES.get(metric.unit, metric.unit)
    assert re.fullmatch(r"penstock_[a-z_]+", metric.name)
    assert (metric.kind == COUNTER) == metric.name.endswith("_total")
    assert f"_{unit}" in metric.name or metric.name in ("penstock_reward_errors_total", table.STEP_MISMATCH.name)
    assert not set(metric.labels) & set(ORIGIN)
    assert metric.kind in (COUNTER, GAUGE, SUMMARY)


def test_every_metric_is_declared_once_and_listed() -> None:
    declared = {value for value in vars(table).values() if isinstance(value, Metric)}
    names = [metric.name for metric in ALL]
    assert declared == set(ALL)
    assert len(names) == len(set(names))


def test_reasons_and_outcomes_are_those_of_their_workers() -> None:
    assert table.REWARD_ERRORS.description.endswith(f": {', '.join(KINDS)}.")
    outcomes = (trajectory.COMPLETED, trajectory.TRUNCATED, trajectory.REJECTED, trajectory.FAILED)
    assert table.ENVIRONMENT_ATTEMPTS.description.endswith(f": {', '.join(outcomes)}.")


def test_the_document_has_the_table() -> None:
    found = re.findall(r"^\| `(penstock_\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert found == [row_of(metric) for metric in ALL], "\n".join(
        f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in map(row_of, ALL)
    )


def row_of(metric: Metric) -> tuple[str, str, str, str]:
    note = f" *({metric.condition})*" if metric.condition else ""
    return metric.name, metric.kind, ", ".join(metric.labels), metric.description + note


def test_each_role_has_its_prefix() -> None:
    of_driver = ("penstock_run_", STEP_PREFIX)
    for role, metrics in METRICS.items():
        prefixes = of_driver if role == "driver" else (f"penstock_{role}_",)
        assert all(metric.name.startswith(prefixes) for metric in metrics)
