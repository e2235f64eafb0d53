"""`penstock grafana DIR`: the files that Prometheus and Grafana read, and what to do with them."""

from pathlib import Path
from typing import Any

import yaml

from penstock.conf.errors import ConfigError
from penstock.orchestrator.observability.grafana.dashboard import dashboard_json
from penstock.orchestrator.observability.grafana.rules import rules_file

DASHBOARD, RULES, SETTINGS = "penstock_dashboard.json", "penstock_rules.yml", "prometheus.yml"
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
"""File to which the head node of Ray writes the addresses of all nodes."""
HOW = """\
{directory}: {dashboard}, {rules}, {settings}

Prometheus, on the head node of the Ray cluster:
  prometheus --config.file={directory}/{settings}
A Prometheus that is there already: take the job `ray` of {settings} into its scrape_configs, and add
{rules} to its rule_files. Ray writes {discovery} where its dashboard runs:
on a cluster always, with a local Ray by cluster.dashboard=true.

Grafana: Dashboards, New, Import, {dashboard}. Or put the file where a provider of dashboards looks;
that of Ray looks into /tmp/ray/session_latest/metrics/grafana/dashboards.
"""


def write(directory: str, discovery: str = DISCOVERY, scrape_s: int = 10) -> str:
    """Write the files. Returns a text on what to do next. `discovery`: the file with Ray's nodes. `scrape_s`: seconds
    between two looks of Prometheus. Raises `ConfigError` for a directory that cannot be written."""
    place = Path(directory)
    files = {
        DASHBOARD: dashboard_json(), RULES: _yaml(rules_file()),
        SETTINGS: _yaml(settings(str(Path(discovery).absolute()), scrape_s)),
    }  # fmt: skip
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error}). Name another directory.") from None
    return HOW.format(
        directory=directory, dashboard=DASHBOARD, rules=RULES, settings=SETTINGS, discovery=discovery
    )  # fmt: skip


def settings(discovery: str, scrape_s: int) -> dict[str, Any]:
    """Settings of Prometheus, which is to read the nodes again and again: the file's name may be a link to where it
    changes, which Prometheus would not notice."""
    nodes = {"files": [discovery], "refresh_interval": f"{scrape_s}s"}
    return {
        "global": {"scrape_interval": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"},
        "rule_files": [RULES],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [nodes]}],
    }


def _yaml(value: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, width=1000)
    return text
