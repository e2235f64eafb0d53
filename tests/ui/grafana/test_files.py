"""`penstock grafana DIR`, without Prometheus or Ray."""

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.cli.main import main
from penstock.metering import table
from penstock.metering.meters import ORIGIN, SUMMARY
from penstock.metering.table import METRICS
from penstock.ui.grafana.dashboard import ROWS
from penstock.ui.grafana.files import RULES
from penstock.ui.grafana.promql import PANELS, RUN

EXPORTED = {metric.exported: metric for metrics in METRICS.values() for metric in metrics}
QUERIES = [query.expr for panels in ROWS.values() for panel in panels for query in panel.queries]


def test_the_command_writes_the_files_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grafana", str(tmp_path / "new"), "--discovery", "/tmp/elsewhere.json"]) == 0
    said = capsys.readouterr().out
    assert f"prometheus --config.file={tmp_path}/new/prometheus.yml" in said
    assert "/tmp/elsewhere.json" in (tmp_path / "new" / "prometheus.yml").read_text()
    board = json.loads((tmp_path / "new" / "penstock_dashboard.json").read_text())
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == list(ROWS)
    shown = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert len(shown) == sum(map(len, ROWS.values()))
    assert [target["expr"] for panel in shown for target in panel["targets"]] == QUERIES
    assert {str(panel["datasource"]["uid"]) for panel in shown} == {"${datasource}"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "SessionName", "run", "run_id"]


def test_nodes_are_looked_for_where_ray_of_this_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/scratch/me")
    assert main(["grafana", str(tmp_path)]) == 0
    assert "/scratch/me/ray/prom_metrics_service_discovery.json" in (tmp_path / "prometheus.yml").read_text()
    assert "/scratch/me/ray/session_latest/metrics/grafana/dashboards" in capsys.readouterr().out


@pytest.mark.real
def test_nodes_are_looked_for_in_the_directory_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    assert main(["grafana", str(tmp_path)]) == 0
    (job,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    ((file,),) = (found["files"] for found in job["file_sd_configs"])
    assert (Path(file).parent / "session_latest").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["grafana", str(tmp_path / "file")]) == 2
    assert "Name another directory" in capsys.readouterr().err


@pytest.mark.parametrize("query", [*QUERIES, *(rule.query for rule in RULES)])
def test_a_query_asks_for_declared_metrics_alone(query: str) -> None:
    names = set(re.findall(r"\bray_\w+", query))
    assert names
    for name in names:
        metric = EXPORTED.get(name) or EXPORTED[re.sub("_(sum|count)$", "", name)]
        assert (metric.kind == SUMMARY) == (name not in EXPORTED)


def test_every_metric_is_shown_or_has_an_alert() -> None:
    asked = "\n".join([*QUERIES, *(rule.query for rule in RULES)])
    assert [name for name in EXPORTED if name not in asked] == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda: PANELS.rate(table.STORE_BYTES, ["run"]),
        lambda: PANELS.value(table.ROLLOUT_TOKENS, ["run"]),
        lambda: PANELS.mean(table.ROLLOUT_TOKENS, ["run"]),
        lambda: PANELS.rate(table.REWARD_ERRORS, ["run", "stage"]),
    ],
)
def test_a_query_that_a_metric_does_not_bear_is_refused(ask) -> None:
    with pytest.raises(ValueError, match="asked for as a"):
        ask()


def test_rates_of_panels_are_of_the_runs_that_are_chosen() -> None:
    expected = (
        'sum by (run, run_id) (rate(ray_penstock_rollout_tokens_total{run=~"$run",run_id=~"$run_id",'
        'SessionName=~"$SessionName"}[$__rate_interval]))'
    )
    assert PANELS.rate(table.ROLLOUT_TOKENS, RUN) == expected
    assert set(RUN) < set(ORIGIN)


@pytest.mark.parametrize("query", [*QUERIES, *(rule.expr for rule in RULES)])
def test_no_query_names_a_run_or_adds_two_of_one_name_up(query: str) -> None:
    assert set(re.findall(r"\brun(?:_id)?=~?\"(.*?)\"", query)) <= {"$run", "$run_id"}
    together = re.findall(r"(?:by|on) \((.*?)\)", query)
    assert together
    assert all({*RUN} <= set(labels.split(", ")) for labels in together)
