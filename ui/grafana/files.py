"""`penstock grafana DIR`: the files that Prometheus and Grafana read, and what to do with them. One has the rules of
alerts, over all runs.

A rule compares what a query says with a bound. What is low because a process has ended is no alert: a rate has values
for as long as its window after the end, so rules about what is low ask for a gauge as well.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.conf.errors import ConfigError
from penstock.conf.renamed import METRICS
from penstock.metering import table
from penstock.metering.meters import RAY_PREFIX
from penstock.orchestrator.cluster.ray_connection import ray_directory
from penstock.ui.grafana.dashboard import dashboard_json
from penstock.ui.grafana.promql import ACTOR, RUN, WAITING, over

DASHBOARD, RULES_FILE, SETTINGS = "penstock_dashboard.json", "penstock_rules.yml", "prometheus.yml"
DISCOVERY = "prom_metrics_service_discovery.json"
"""Name of the file to which the head node of Ray writes the addresses of all nodes."""
HOW = """\
{directory}: {dashboard}, {rules}, {settings}

Prometheus, on the head node of the Ray cluster:
  prometheus --config.file={directory}/{settings}
A Prometheus that is there already: take the job `ray` of {settings} into its scrape_configs, and add
{rules} to its rule_files. Ray writes {discovery} where its dashboard runs:
on a cluster always, with a local Ray by cluster.dashboard=true.

Grafana: Dashboards, New, Import, {dashboard}. Or put the file where a provider of dashboards looks;
that of Ray looks into {ray}/session_latest/metrics/grafana/dashboards.
"""
GROUP = "penstock"
OF_RUN = "{{ $labels.run }} ({{ $labels.run_id }})"
LATELY = over("10m")
NOT_OF_THE_TASK = 'reason!="no_signal"'
"""Condition on rows that an algorithm did not drop on purpose, as it does with groups without a signal."""
THERE = LATELY.value(table.ROLLOUT_RUNNING, ACTOR)
GOES_ON = f"and on (run, run_id) {LATELY.value(table.STORE_SEEN, RUN)}"


@dataclass(frozen=True)
class Rule:
    name: str
    query: str
    comparison: str
    """The comparison with its bound, such as `> 0.9`."""
    holds: str
    """Time for which the rule has to hold before the alert is sent."""
    severity: str
    summary: str
    """A sentence with Prometheus' templates, and <run>."""
    advice: str

    @property
    def expr(self) -> str:
        return f"({self.query}) {self.comparison}"

    def as_yaml(self) -> dict[str, Any]:
        return {
            "alert": self.name, "expr": self.expr, "for": self.holds, "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary.replace("<run>", OF_RUN), "description": self.advice},
        }  # fmt: skip


def _errors_share() -> str:
    errors, samples = LATELY.rate(table.REWARD_ERRORS, RUN), LATELY.rate(table.REWARD_SAMPLES, RUN)
    return f"{errors} / ({errors} + {samples})"


RULES = (
    Rule(
        "PenstockTrainerStarved",
        f"avg by (run, run_id) ({LATELY.rate(table.TRAINER_PHASES, ACTOR, WAITING)}) {GOES_ON}",
        "> 0.9", "15m", "warning", "Ranks of <run> wait {{ $value | humanizePercentage }} of the time",
        "They wait for batches. More engines (penstock scale RUN rollout=+1), or max_staleness=1 where it is 0.",
    ),
    Rule(
        "PenstockEngineIdle",
        f"1 - ({LATELY.rate(table.ROLLOUT_BUSY, ACTOR)} and on (run, run_id, actor) {THERE})",
        "> 0.9", "15m", "warning",
        "{{ $labels.actor }} of <run> is idle {{ $value | humanizePercentage }} of the time",
        "Fewer engines would do, or max_staleness is too small for engines and ranks to overlap.",
    ),
    Rule(
        "PenstockMembersLost",
        over("15m").growth(table.RUN_LOST, (*RUN, "member_role")),
        "> 0", "0m", "warning", "<run> has lost a {{ $labels.member_role }}",
        "Others take its place. Events and stacks/ of the run's directory say why it was lost.",
    ),
    Rule(
        "PenstockRowsDropped",
        f"{LATELY.rate(table.STORE_DROPPED, (*RUN, 'reason'), NOT_OF_THE_TASK)} "
        f"/ on (run, run_id) group_left () {LATELY.rate(table.STORE_ADMITTED, RUN)}",
        "> 0.3", "10m", "warning",
        "<run> drops {{ $value | humanizePercentage }} of its rows: {{ $labels.reason }}",
        "`penstock status RUN` says what workers said of the last of them.",
    ),
    Rule(
        "PenstockRewardErrors",
        _errors_share(),
        "> 0.1", "10m", "warning", "{{ $value | humanizePercentage }} of the rewards of <run> fail",
        "`penstock status RUN` says how. Samples without a reward are not trained.",
    ),
    Rule(
        "PenstockNoStep",
        f"time() - {LATELY.value(table.TRAINER_LAST_STEP, RUN)}",
        "> 1800", "0m", "critical", "<run> has made no step for {{ $value | humanizeDuration }}",
        "`penstock status RUN` says who waits for what. Raise the bound where steps take that long.",
    ),
    Rule(
        "PenstockKvCacheFull",
        LATELY.average(table.ROLLOUT_KV_CACHE, ACTOR),
        "> 0.95", "10m", "warning", "The KV cache of {{ $labels.actor }} of <run> is full",
        "Sequences wait or are computed again. Raise rollout.kv_cache_gib or rollout.gpu_memory_utilization, or lower "
        "rollout.max_concurrent_samples.",
    ),
    Rule(
        "PenstockMismatch",
        LATELY.value(table.STEP_MISMATCH, RUN),
        "> 0.1", "10m", "warning", "Trainer and engines of <run> differ by {{ $value }} nats a token",
        "They do not compute the same policy. Compare rollout.dtype with the trainer's.",
    ),
    Rule(
        "PenstockStoreNearlyFull",
        f"{LATELY.value(table.STORE_BYTES, RUN)} / {LATELY.value(table.STORE_CAPACITY, RUN)}",
        "> 0.9", "5m", "warning", "The store of <run> is {{ $value | humanizePercentage }} full",
        "New prompts wait for room. Raise store.max_bytes, or find the stage whose rows pile up: penstock status RUN.",
    ),
)  # fmt: skip


def write(directory: str, discovery: str | None = None, scrape_s: int = 10) -> str:
    """Write the files. Returns a text on what to do next. `discovery`: the file with Ray's nodes; None: that of the
    cluster at RAY_ADDRESS, which is asked for its directory, or of a Ray of this machine. `scrape_s`: seconds
    between two looks of Prometheus. Raises `ConfigError` for a directory that cannot be written."""
    place, discovery = Path(directory), discovery or f"{ray_directory()}/{DISCOVERY}"
    alerts = {"name": GROUP, "rules": [rule.as_yaml() for rule in RULES]}
    rules = {"groups": [alerts, {"name": f"{GROUP}_renamed", "rules": old_names()}]}
    files = {
        DASHBOARD: dashboard_json(), RULES_FILE: _yaml(rules),
        SETTINGS: _yaml(settings(str(Path(discovery).absolute()), scrape_s)),
    }  # fmt: skip
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error}). Name another directory.") from None
    names = {"dashboard": DASHBOARD, "rules": RULES_FILE, "settings": SETTINGS}
    return HOW.format(directory=directory, discovery=discovery, ray=Path(discovery).parent, **names)


def old_names() -> list[dict[str, str]]:
    """Rules that record series by the names that they had."""
    return [{"record": f"{RAY_PREFIX}{old}", "expr": f"{RAY_PREFIX}{present.name}"} for old, present in METRICS.items()]


def settings(discovery: str, scrape_s: int) -> dict[str, Any]:
    """Settings of Prometheus, which is to read the nodes again and again: the file's name may be a link to where it
    changes, which Prometheus would not notice."""
    nodes = {"files": [discovery], "refresh_interval": f"{scrape_s}s"}
    return {
        "global": {"scrape_interval": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"},
        "rule_files": [RULES_FILE],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [nodes]}],
    }


def _yaml(value: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, width=1000)
    return text
