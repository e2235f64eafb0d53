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

from penstock.metering.table import MEMBER_ROLES, ON_GPU
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.grafana.dashboard import ROWS
from penstock.orchestrator.observability.grafana.files import RULES, SETTINGS, write
from penstock.orchestrator.run import run
from tests.orchestrator.observability.grafana.prometheus import Prometheus, running
from tests.ray_cluster import running_cluster

pytestmark = pytest.mark.real

GAME = Path(__file__).parents[2] / "runs" / "digits_game.py"
ANSWER_S = 600.0
NAME = "watched"


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
        self.actors: list[Any] = []
        self.jobs: list[Any] = []
        self._looked, self._give_up = 0.0, time.monotonic() + ANSWER_S

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.last = {**metrics, "step": step}
        if time.monotonic() - self._looked < 1.0:
            return
        for name, query in list(self.open.items()):
            if answer := self._prometheus.ask(query):
                self.answers[name] = answer
                del self.open[name]
        self._looked = time.monotonic()
        if not self.open:
            self.actors, self.jobs = list_actors(detail=True), list_jobs(detail=True)
            raise AllAnsweredError
        if self._looked > self._give_up:
            pytest.fail(f"nothing in Prometheus for {self.open}")

    def close(self) -> None: ...


def in_words(query: str) -> str:
    """A panel's query, with what Grafana puts in for its variables."""
    return query.replace("$__rate_interval", "1m").replace("$SessionName", ".+").replace("$run", NAME)


def all_queries() -> dict[str, str]:
    panels = [panel for panels in ROWS.values() for panel in panels if panel.condition != ON_GPU]
    of_panels = {f"{panel.title}, {query.legend}": in_words(query.expr) for panel in panels for query in panel.queries}
    return of_panels | {rule.name: rule.query for rule in RULES}


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
    (tokens,) = looking.answers["Tokens a second, by engine, {{run}} {{actor}}"]
    assert tokens["metric"] == {"run": NAME, "actor": "Rollout-0"}
    assert float(tokens["value"][1]) > 0
    lost = looking.answers["PenstockMembersLost"]
    assert {series["metric"]["member_role"] for series in lost} == set(MEMBER_ROLES)
    assert {float(series["value"][1]) for series in lost} == {0.0}, "nobody died"


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
    rules = prometheus.rules()
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
        "penstock.run": NAME, "penstock.algorithm": "grpo", "penstock.directory": str(looking.directory),
        "penstock.page": f"penstock ui {looking.directory}", "team": "red",
    }  # fmt: skip
