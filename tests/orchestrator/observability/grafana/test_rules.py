"""Each alert fires where it is to, and neither in a run that is well nor after one that has ended. Prometheus' own
promtool evaluates the rules over made series."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.metering import table
from penstock.metering.meters import Metric
from penstock.metering.ray_export import ALMOST_NOTHING
from penstock.orchestrator.observability.grafana.files import RULES, RULES_FILE, write
from tests.orchestrator.observability.grafana.prometheus import needed

pytestmark = pytest.mark.real

Series = tuple[Metric, dict[str, str], str]
MINUTES = 45
"""Minutes after which the alerts are looked at. Series have one value a minute until then."""
ENGINE, RANK = {"actor": "Rollout-0"}, {"actor": "Trainer-policy-0"}
WAIT = RANK | {"phase": "wait"}
THERE, ENGINE_THERE = (table.STORE_SEEN, {}, "1x60"), (table.ROLLOUT_RUNNING, ENGINE, "0x60")
NONE, ONE = f"{ALMOST_NOTHING}x60", f"{ALMOST_NOTHING}x40 1x20"

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
        "bad": [(table.RUN_LOST, {"member_role": "rollout"}, ONE)],
        "well": [(table.RUN_LOST, {"member_role": "rollout"}, NONE)],
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
        "bad": [(table.TRAINER_MISMATCH, RANK, "0.5x60")],
        "well": [(table.TRAINER_MISMATCH, RANK, "0.01x60")],
    },
    "PenstockStoreNearlyFull": {
        "bad": [(table.STORE_BYTES, {}, "95x60"), (table.STORE_CAPACITY, {}, "100x60")],
        "well": [(table.STORE_BYTES, {}, "50x60"), (table.STORE_CAPACITY, {}, "100x60")],
    },
}  # fmt: skip


def unit_test(name: str, series: list[Series], fires: bool) -> dict[str, Any]:
    """A unit test as promtool reads it: how many alerts of that name fire."""
    inputs = []
    for metric, labels, values in series:
        suffix = "_sum" if metric.buckets else ""
        written = ",".join(f'{label}="{value}"' for label, value in {"run": "sums", **labels}.items())
        inputs.append({"series": f"{metric.exported}{suffix}{{{written}}}", "values": values})
    count = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    expected = {"expr": count, "eval_time": f"{MINUTES}m", "exp_samples": [{"labels": "{}", "value": int(fires)}]}
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": [expected]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(str(tmp_path))
    return tmp_path


def test_each_rule_fires_where_it_is_to_and_nowhere_else(files: Path) -> None:
    assert CASES.keys() == {rule.name for rule in RULES}
    tests = [
        unit_test(name, series, fires=case == "bad") for name, cases in CASES.items() for case, series in cases.items()
    ]
    (files / "cases.yml").write_text(
        yaml.safe_dump({"rule_files": [RULES_FILE], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(
        [needed("promtool"), "test", "rules", files / "cases.yml"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_the_files(files: Path) -> None:
    for what, name in (("rules", RULES_FILE), ("config", "prometheus.yml")):
        command = [needed("promtool"), "check", what, str(files / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout
