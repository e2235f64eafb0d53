"""A recipe's measured curves are drawn behind those of runs with its settings, and those alone."""

import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.observability.charts.known_curves import (
    FILE,
    KnownCurve,
    KnownCurves,
    settings_of,
    with_known,
    write_known,
)
from penstock.orchestrator.observability.charts.themes import charts_of
from penstock.orchestrator.observability.diagnosis import Diagnosis, below_band
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.report import write_report
from penstock.orchestrator.run_directory.run_directory import RunDirectory, to_yaml
from penstock.workers.user_code import packaged_recipes
from tests.orchestrator.observability.reporting.test_report import numbers_of

ACCURACY = "accuracy/heldout"
KNOWN = KnownCurves((1, 2), "a CPU", {}, {ACCURACY: KnownCurve((0, 10), (0.3, 0.8), (0.35, 0.9), (0.4, 0.95))})


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of the user's own."""
    directory = tmp_path / "mine"
    shutil.copytree(packaged_recipes()["arithmetic"], directory)
    (directory / FILE).unlink(missing_ok=True)
    return directory


def made(tmp_path: Path, recipe: Path, name: str, accuracies: list[float], *words: str) -> RunDirectory:
    """A finished run with its accuracies at steps 0, 10, 20, …"""
    directory = RunDirectory.create(load_config([f"output_dir={tmp_path}", f"recipe={recipe}", f"name={name}", *words]))
    for number, accuracy in enumerate(accuracies):
        directory.log_metrics({"step": 10 * number, ACCURACY: accuracy, "reward/mean": accuracy / 2})
    directory.close()
    return directory


def test_runs_of_several_seeds_make_a_band_for_the_next(tmp_path: Path, recipe: Path) -> None:
    runs = [made(tmp_path, recipe, f"run{seed}", [0.1, seed / 10, 0.9][: seed + 1], f"seed={seed}") for seed in (1, 2)]
    file = write_known([str(run.path) for run in runs])
    assert file == str(recipe / FILE)
    other = made(tmp_path, recipe, "other", [0.1], "seed=9", "tracking.samples_every_steps=0", "checkpoint.keep_last=1")
    known = KnownCurves.of_config(other.read_config())
    assert known is not None
    assert known.seeds == (1, 2)
    # The third step is one run's alone.
    assert known.curves[ACCURACY] == KnownCurve((0, 10), (0.1, 0.1), (0.1, 0.15), (0.1, 0.2))
    assert known.curves["reward/mean"].high == (0.05, 0.1)
    page = write_report(other.path).read_text()
    charts = {chart["name"]: chart for chart in numbers_of(page)["charts"]}
    assert charts["accuracy"]["known"]["label"] == "the recipe's 2 seeds"
    assert charts["accuracy"]["known"]["high"] == [0.1, 0.2]
    assert (other.plots / "accuracy.png").stat().st_size > 0


@pytest.mark.parametrize("word", ["trainer.optimizer.lr=0.1", "algorithm=rloo", "trainer.max_steps=7"])
def test_a_run_of_other_settings_has_none(tmp_path: Path, recipe: Path, word: str) -> None:
    runs = [made(tmp_path, recipe, f"run{seed}", [0.1], f"seed={seed}") for seed in (1, 2)]
    write_known([str(run.path) for run in runs])
    other = made(tmp_path, recipe, "other", [0.1], word)
    assert KnownCurves.of_config(other.read_config()) is None
    charts = charts_of([ACCURACY], other.read_config())
    assert with_known(charts, other.read_config()) == charts
    with pytest.raises(ConfigError, match=f"{word.split('=')[0].split('.')[0]}.* differ.*no band of both"):
        write_known([str(runs[0].path), str(other.path)])


def test_one_run_and_runs_without_a_recipe_make_no_band(tmp_path: Path, recipe: Path) -> None:
    run = made(tmp_path, recipe, "run", [0.1])
    with pytest.raises(ConfigError, match="two runs at least"):
        write_known([str(run.path)])
    plain = RunDirectory.create(load_config([f"output_dir={tmp_path}", "name=plain"]))
    plain.close()
    with pytest.raises(ConfigError, match="none of a recipe"):
        write_known([str(plain.path), str(plain.path)])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seeds": [1]}'])
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, recipe: Path, text: str) -> None:
    run = made(tmp_path, recipe, "run", [0.1])
    (recipe / FILE).write_text(text)
    assert KnownCurves.of_config(run.read_config()) is None


def test_far_below_the_band_is_a_warning_and_within_a_seeds_distance_none() -> None:
    assert below_band(KNOWN, 10, {ACCURACY: 0.7}) is None
    assert below_band(KNOWN, 5, {ACCURACY: 0.1}) is None  # nothing is known of that step
    assert below_band(KNOWN, 10, {}) is None
    found = below_band(KNOWN, 10, {ACCURACY: 0.6})
    assert found is not None
    assert found.text == "held-out accuracy is 60.0%, and with the recipe's 2 seeds 80.0% to 95.0%"


def test_the_run_says_so(tmp_path: Path) -> None:
    config = load_config([f"output_dir={tmp_path}", "recipe=arithmetic", "name=demo"])
    directory, progress = RunDirectory.create(config), ProgressDisplay(config, "demo", console=Console(quiet=True))
    (found,) = Diagnosis(DiagnosisConfig(), 0, directory, progress, KNOWN).look(10, {"step": 10, ACCURACY: 0.5})
    progress.close()
    directory.close()
    assert found.rule == "below_band"
    assert directory.read_events()[-1]["rule"] == "below_band"


def test_a_recipe_with_code_beside_it_has_its_band_wherever_it_lies(tmp_path: Path) -> None:
    settings = []
    for name in ("here", "there"):
        directory = tmp_path / name / "mine"
        directory.mkdir(parents=True)
        (directory / "reward.py").write_text("def score(text, task):\n    return 0.0\n")
        (directory / "recipe.yaml").write_text("base: arithmetic\nreward: {function: reward.py:score, options: {}}\n")
        config = load_config([f"recipe={directory}"])
        assert config.reward.function == f"{directory}/reward.py:score"
        settings.append(settings_of(yaml.safe_load(to_yaml(config))))
    assert settings[0] == settings[1]
    assert settings[0]["reward.function"] == "reward.py:score"


@pytest.mark.parametrize(
    "name", sorted(name for name, directory in packaged_recipes().items() if (directory / FILE).exists())
)
def test_a_shipped_band_is_that_of_the_recipe_as_it_is(name: str) -> None:
    """Who changes a recipe measures it again."""
    known = KnownCurves.of_config(yaml.safe_load(to_yaml(resolve(load_config([f"recipe={name}"])).config)))
    assert known is not None, "penstock report --band makes it anew from runs of three seeds"
    assert len(known.seeds) >= 3
    assert known.cpu
    assert ACCURACY in known.curves
