"""Each alert fires where it is to, and neither in a run that is well nor after one that has ended. Prometheus' own
promtool evaluates the rules over made series."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.conf.renamed import METRICS
from penstock.metering import table
from penstock.metering.meters import Metric
from penstock.ui.grafana.files import RULES, RULES_FILE, write
from tests.ui.grafana.prometheus import needed

pytestmark = pytest.mark.real

Series = tuple[Metric, dict[str, str], str]
MINUTES = 45
"""Minutes after which the alerts are looked at. Series have one value a minute until then."""
ENGINE, RANK = {"actor": "Rollout-0"}, {"actor": "Trainer-policy-0"}
WAIT = RANK | {"phase": "wait"}
THERE, ENGINE_THERE = (table.STORE_SEEN, {}, "1x60"), (table.ROLLOUT_RUNNING, ENGINE, "0x60")
LOST = (table.RUN_LOST, {"member_role": "rollout"})

CASES: dict[str, dict[str, list[Series]]] = {
    "PenstockTrainerStarved": {
        "bad": [(table.TRAINER_PHASES, WAIT, "0+58x60"), THERE],
        "well": [(table.TRAINER_PHASES, WAIT, "0+40x60"), THERE],
        "ended": [(table.TRAINER_PHASES, WAIT, "0+58x60"), (table.STORE_SEEN, {}, "1x20")],
    },
    "PenstockEngineIdle": {
        "bad": [(table.ROLLOUT_BUSY, ENGINE, "0+1x60"), ENGINE_THERE],
        "well": [(table.ROLLOUT_BUSY, ENGINE, "0+50x60"), ENGINE_THERE],
        "ended": [(table.ROLLOUT_BUSY, ENGINE, "0+50x10 500x50"), (table.ROLLOUT_RUNNING, ENGINE, "0x10")],
    },
    "PenstockMembersLost": {
        "bad": [(*LOST, "_x40 1x20")],
        "again": [(*LOST, "1x40 2x20")],
        "well": [(*LOST, "1x60")],
    },
    "PenstockRowsDropped": {
        "bad": [(table.STORE_DROPPED, {"reason": "stale"}, "0+40x60"), (table.STORE_ADMITTED, {}, "0+100x60")],
        "well": [(table.STORE_DROPPED, {"reason": "stale"}, "0+10x60"), (table.STORE_ADMITTED, {}, "0+100x60")],
        "meant": [(table.STORE_DROPPED, {"reason": "no_signal"}, "0+40x60"), (table.STORE_ADMITTED, {}, "0+100x60")],
    },
    "PenstockRewardErrors": {
        "bad": [(table.REWARD_ERRORS, {"reason": "raised"}, "0+20x60"), (table.REWARD_SAMPLES, {}, "0+80x60")],
        "well": [(table.REWARD_ERRORS, {"reason": "raised"}, "0+5x60"), (table.REWARD_SAMPLES, {}, "0+95x60")],
    },
    "PenstockNoStep": {
        "bad": [(table.TRAINER_LAST_STEP, RANK, "600x60")],
        "well": [(table.TRAINER_LAST_STEP, RANK, "0+60x60")],
        "ended": [(table.TRAINER_LAST_STEP, RANK, "600x20")],
    },
    "PenstockKvCacheFull": {
        "bad": [(table.ROLLOUT_KV_CACHE, ENGINE, "0.99x60")],
        "well": [(table.ROLLOUT_KV_CACHE, ENGINE, "0.9 0.99 0.6x58")],
    },
    "PenstockMismatch": {
        "bad": [(table.STEP_MISMATCH, RANK, "0.5x60")],
        "well": [(table.STEP_MISMATCH, RANK, "0.01x60")],
    },
    "PenstockStoreNearlyFull": {
        "bad": [(table.STORE_BYTES, {}, "95x60"), (table.STORE_CAPACITY, {}, "100x60")],
        "well": [(table.STORE_BYTES, {}, "50x60"), (table.STORE_CAPACITY, {}, "100x60")],
    },
}  # fmt: skip


FIRING = ("bad", "again")
"""Cases in which an alert is sent."""


def unit_test(name: str, runs: dict[str, list[Series]], firing: str) -> dict[str, Any]:
    """A unit test as promtool reads it: ids of the runs for which an alert of that name fires. `runs`: series by the
    ids of runs, which have one name."""
    inputs = []
    for run_id, series in runs.items():
        for metric, labels, values in series:
            all_labels = {"run": "sums", "run_id": run_id, **labels}
            written = ",".join(f'{label}="{value}"' for label, value in all_labels.items())
            inputs.append({"series": f"{metric.exported}{{{written}}}", "values": values})
    ids = f'count by (run_id) (ALERTS{{alertname="{name}",alertstate="firing"}})'
    samples = [{"labels": f'{{run_id="{firing}"}}', "value": 1}] if firing else []
    expected = {"expr": ids, "eval_time": f"{MINUTES}m", "exp_samples": samples}
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": [expected]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(str(tmp_path))
    return tmp_path


def check(files: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool make the tests."""
    about = {"rule_files": [RULES_FILE], "evaluation_interval": "1m", "tests": tests}
    (files / "cases.yml").write_text(yaml.safe_dump(about))
    done = subprocess.run(
        [needed("promtool"), "test", "rules", files / "cases.yml"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_rule_fires_where_it_is_to_and_nowhere_else(files: Path) -> None:
    assert CASES.keys() == {rule.name for rule in RULES}
    check(files, [
        unit_test(name, {"a": series}, firing="a" if case in FIRING else "")
        for name, cases in CASES.items() for case, series in cases.items()
    ])  # fmt: skip


def test_a_run_that_is_well_hides_none_of_its_name_that_is_not(files: Path) -> None:
    check(files, [unit_test(name, {"a": cases["bad"], "b": cases["well"]}, "a") for name, cases in CASES.items()])


def test_a_series_is_recorded_by_the_name_that_it_had(files: Path) -> None:
    series = 'penstock_trainer_step_phase_seconds_{}{{phase="wait",run="sums"}}'.format
    inputs = [{"series": f"ray_{series('total')}", "values": "7x60"}]
    sample = {"labels": f"ray_{series('sum')}", "value": 7}
    expected = {"expr": "ray_penstock_trainer_step_phase_seconds_sum", "eval_time": "5m", "exp_samples": [sample]}
    check(files, [{"interval": "1m", "input_series": inputs, "promql_expr_test": [expected]}])


def test_promtool_finds_nothing_wrong_with_the_files(files: Path) -> None:
    for what, name in (("rules", RULES_FILE), ("config", "prometheus.yml")):
        command = [needed("promtool"), "check", what, str(files / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES) + len(METRICS)} rules found" in done.stdout
