"""What a tracker is told: how a run is called, and what it came to."""

import asyncio
from pathlib import Path

import pytest

from penstock.conf.errors import DataError, TakenOver
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.trackers import About, End
from penstock.orchestrator.run_directory.run_directory import RunDirectory


def of(place: Path, *words: str) -> tuple[About, RunDirectory]:
    config = load_config(["recipe=arithmetic", f"output_dir={place}", "name=sums", *words])
    directory = RunDirectory.create(config)
    return About.of(config, directory), directory


def test_a_run_is_told_by_its_name_its_recipe_and_its_whole_configuration(tmp_path: Path) -> None:
    about, _ = of(tmp_path, "tracking.tags.team=blue")
    assert (about.name, about.group, about.project) == ("sums", "arithmetic", None)
    assert about.tags == {"recipe": "arithmetic", "algorithm": "grpo", "team": "blue"}
    assert about.config["trainer"]["max_steps"] == 100


def test_its_group_and_project_can_be_named(tmp_path: Path) -> None:
    about, _ = of(tmp_path, "tracking.group=sweep-7", "tracking.project=adding")
    assert (about.group, about.project) == ("sweep-7", "adding")


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (None, "finished", ""),
        (DataError("no rows"), "failed", "DataError: no rows"),
        (KeyboardInterrupt(), "interrupted", ""),
        (asyncio.CancelledError(), "interrupted", ""),
        (TakenOver("by another"), "taken_over", ""),
    ],
)
def test_the_end_is_told_with_its_error(tmp_path: Path, error: BaseException | None, state: str, text: str) -> None:
    _, directory = of(tmp_path)
    end = End.of(error, directory)
    assert (end.state, end.error) == (state, text)


def test_the_end_has_the_cards_of_the_report(tmp_path: Path) -> None:
    _, directory = of(tmp_path)
    directory.log_metrics({"step": 1, "reward/mean": 0.25})
    directory.log_metrics({"step": 2, "reward/mean": 0.5})
    facts = End.of(None, directory).facts()
    assert facts["summary/Mean reward"] == "0.250 → 0.500 (best step 0.500)"
    assert facts["summary/Policy updates"] == "2 (of 100 asked for)"
    assert facts["state"] == "finished"


def test_a_directory_that_is_gone_costs_the_cards_alone(tmp_path: Path) -> None:
    _, directory = of(tmp_path)
    directory.config_file.unlink()
    assert End.of(None, directory) == End("finished")
