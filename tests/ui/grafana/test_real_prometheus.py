"""A run whose metrics a real Prometheus scrapes from Ray: every panel and every rule finds data, and Ray's own state
names the run and its actors."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ray.util.state import list_actors, list_jobs

from penstock.conf.renamed import METRICS as RENAMED
from penstock.metering.meters import RAY_PREFIX
from penstock.metering.table import METRICS, ON_DROPS, ON_ERRORS, ON_GPU, ON_LOSSES, ON_SERVER
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.ui.grafana.dashboard import ROWS
from penstock.ui.grafana.files import RULES, SETTINGS, write
from tests.ray_cluster import running_cluster
from tests.ui.grafana.prometheus import Prometheus, running

pytestmark = pytest.mark.real

TOKENS = "Tokens a second, by engine, {{run}} {{run_id}} {{actor}}"
GAME = Path(__file__).parents[2] / "orchestrator" / "runs" / "digits_game.py"
ANSWER_S = 600.0
NAME = "watched"
OLD_NAMES = "|".join(f"{RAY_PREFIX}{name}" for name in RENAMED)
SERIES = f'{{__name__=~"ray_penstock_.+",__name__!~"{OLD_NAMES}",run="{NAME}"}}'
"""Series of the run that Ray exports: those by old names are Prometheus' own."""
MOST_OF_RUN, MOST_OF_ACTOR = 60, 12
"""Most series of a run besides its ranks, and of a rank or an engine."""
ABSENT = [
    metric.exported
    for metrics in METRICS.values()
    for metric in metrics
    if metric.condition in (ON_GPU, ON_DROPS, ON_ERRORS, ON_LOSSES, ON_SERVER)
]
"""Metrics that a run without trouble on CPUs has not."""


class AllAnsweredError(Exception):
    """Ends the run: it has been seen."""


class Looking:
    """A sink that asks Prometheus, once a second, what has not been answered yet."""

    def __init__(self, prometheus: Prometheus, queries: Mapping[str, str], directory: Path) -> None:
        self._prometheus, self.open = prometheus, dict(queries)
        self.directory = directory
        """Of the run."""
        self.last: dict[str, Any] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.series: list[dict[str, Any]] = []
        """Numbers of series by role and actor, at the end."""
        self.actors: list[Any] = []
        self.jobs: list[Any] = []
        self._looked, self._give_up = 0.0, time.monotonic() + ANSWER_S

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.last = {**metrics, "step": step}
        if time.monotonic() - self._looked < 1.0:
            return
        for name, query in list(self.open.items()):
            answer = self._prometheus.ask(query)
            # A rate is 0 while the scrapes that it is made of have the same count.
            if answer and (name != TOKENS or float(answer[0]["value"][1]) > 0):
                self.answers[name] = answer
                del self.open[name]
        self._looked = time.monotonic()
        if not self.open:
            self.series = self._prometheus.ask(f"count by (role, actor) ({SERIES})")
            self.actors, self.jobs = list_actors(detail=True), list_jobs(detail=True)
            raise AllAnsweredError
        if self._looked > self._give_up:
            pytest.fail(f"nothing in Prometheus for {self.open}")

    def close(self) -> None: ...


def in_words(query: str) -> str:
    """A panel's query, with what Grafana puts in for its variables."""
    for variable, value in {"__rate_interval": "1m", "SessionName": ".+", "run_id": ".+", "run": NAME}.items():
        query = query.replace(f"${variable}", value)
    return query


def all_queries() -> dict[str, str]:
    panels = [panel for panels in ROWS.values() for panel in panels]
    of_panels = {f"{panel.title}, {query.legend}": in_words(query.expr) for panel in panels for query in panel.queries}
    queries = of_panels | {rule.name: rule.query for rule in RULES}
    return {name: query for name, query in queries.items() if not any(metric in query for metric in ABSENT)}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: Ray makes sockets below it."""
    path = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def watched(warm_python: list[str], folder: Path) -> Iterator[None]:
    """A Ray cluster with its dashboard, whose metrics are a second old at most."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_metrics_report_interval_ms", "1000")
        node = {"num_cpus": 16, "include_dashboard": True, "temp_dir": str(folder)}
        with running_cluster(warm_python, [node]) as address:
            environment.setenv("RAY_ADDRESS", address)
            yield


@pytest.fixture(scope="module")
def seen(
    watched: None, folder: Path, small_run: list[str], warm_spawn: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Looking, Prometheus]]:
    place = tmp_path_factory.mktemp("seen")
    write(str(place), str(folder / "prom_metrics_service_discovery.json"), scrape_s=1)
    words = [
        *small_run, "rollout.engine=vllm", f"environment.name={GAME}:Digits", "data.source=environment",
        "rewards=[{function: environment}, {function: digits}]", "trainer.max_steps=100000", "evaluation.every_steps=0",
        "checkpoint.every_steps=0", "max_staleness=1", f"name={NAME}", f"output_dir={place}",
        "tracking.tags={team: red}",
    ]  # fmt: skip
    with running(place / SETTINGS, place) as prometheus:
        looking = Looking(prometheus, all_queries(), place / NAME)
        with pytest.raises(AllAnsweredError):
            run(load_config(words), sinks=[looking], quiet=True)
        yield looking, prometheus


def test_every_panel_and_every_rule_finds_data(seen: tuple[Looking, Prometheus]) -> None:
    looking, _ = seen
    assert looking.answers.keys() == all_queries().keys()


def test_a_series_says_which_run_and_actor_it_is_of(seen: tuple[Looking, Prometheus]) -> None:
    looking, _ = seen
    (tokens,) = looking.answers[TOKENS]
    run_id = RunDirectory.open(looking.directory).run_id
    assert tokens["metric"] == {"run": NAME, "run_id": run_id, "actor": "Rollout-0"}
    assert float(tokens["value"][1]) > 0


def test_a_run_has_few_series(seen: tuple[Looking, Prometheus]) -> None:
    looking, _ = seen
    counts = {(one["metric"]["role"], one["metric"]["actor"]): int(one["value"][1]) for one in looking.series}
    assert {role for role, _ in counts} == {"driver", "environment", "reward", "rollout", "store", "trainer"}
    assert sum(count for (role, _), count in counts.items() if role != "trainer") <= MOST_OF_RUN, counts
    assert max(count for (role, _), count in counts.items() if role in ("trainer", "rollout")) <= MOST_OF_ACTOR, counts


def test_no_metric_is_named_after_an_actor(seen: tuple[Looking, Prometheus]) -> None:
    looking, prometheus = seen
    names = {one["metric"]["__name__"] for one in prometheus.ask(f"last_over_time({SERIES}[1h])")}
    actors = {actor.name.partition("-")[0] for actor in looking.actors if actor.name}
    assert len(names) > len(METRICS)
    assert not [name for name in names if any(actor in name for actor in actors)]


def test_the_series_of_a_run_leave_ray_with_it(seen: tuple[Looking, Prometheus]) -> None:
    _, prometheus = seen
    give_up = time.monotonic() + ANSWER_S
    while there := prometheus.ask(SERIES):
        assert time.monotonic() < give_up, there
        time.sleep(1.0)


def test_what_is_counted_in_actors_is_what_the_run_logs(seen: tuple[Looking, Prometheus]) -> None:
    """The newest numbers are a few steps old: what is exported is never more than what was done."""
    looking, prometheus = seen
    last = looking.last
    for name, logged in {
        "trainer_steps": last["step"],
        "store_admitted_rows": last["store/groups_admitted"] * 4,
    }.items():
        (counted,) = prometheus.ask(f"sum(max_over_time(ray_penstock_{name}_total[5m]))")
        assert 0 < float(counted["value"][1]) <= logged + 64


def test_prometheus_evaluates_every_rule_without_an_error(seen: tuple[Looking, Prometheus]) -> None:
    _, prometheus = seen
    rules = [rule for rule in prometheus.rules() if rule["type"] == "alerting"]
    assert [rule["name"] for rule in rules] == [rule.name for rule in RULES]
    assert {rule.get("lastError", "") for rule in rules} == {""}


def test_ray_shows_actors_by_their_names(seen: tuple[Looking, Prometheus]) -> None:
    looking, _ = seen
    alive = {actor.name: actor for actor in looking.actors if actor.state == "ALIVE"}
    assert alive.keys() >= {"Rollout-0", "Trainer-policy-0", "Environment-0", "Store", "Prompts"}
    for name in ("Rollout-0", "Trainer-policy-0", "Environment-0", "Reward-0", "Compute-group_advantage"):
        assert alive[name].repr_name == name


def test_rays_job_says_which_run_it_is_and_where(seen: tuple[Looking, Prometheus]) -> None:
    looking, _ = seen
    assert looking.jobs[-1].metadata == {
        "penstock.run": NAME, "penstock.run_id": RunDirectory.open(looking.directory).run_id,
        "penstock.algorithm": "grpo", "penstock.directory": str(looking.directory),
        "penstock.page": f"penstock ui {looking.directory}", "team": "red",
    }  # fmt: skip
