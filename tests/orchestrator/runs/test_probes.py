"""A plan that is tried on a real cluster: some steps are made and measured, and a run that cannot be does not matter.

Its split is the run's own: plans are for GPUs."""

from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.calibration import STEPS, fastest_probe, first_steps, probe, run_in_process
from penstock.planner.plan_inputs import search_of

pytestmark = pytest.mark.real


@pytest.mark.promise("Which split of GPUs fits?")
def test_a_probe_is_a_run_whose_steps_are_measured(
    warm_python: list[str], ray_address: str, small_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    search = search_of(load_config(["recipe=gsm8k", "model.path=Qwen/Qwen2.5-0.5B"]), "1x2:h100", "100")
    words = [*small_run, "rollout.engine=hf", "rollout.num_threads=1", "trainer.num_threads=1"]
    run = partial(run_in_process, command=[*warm_python, "-m", "penstock.cli.main", "run"])
    plan, wrong = search.plans[0], [*words, f"model.path={tmp_path}/nowhere"]
    failed, done = probe([(plan, wrong), (plan, words)], tmp_path, 900.0, run, Console(quiet=True))
    assert failed.failure.startswith("exit code 2: model: ")
    assert done.failure == ""
    assert fastest_probe([failed, done]) is done
    place = next(path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("2-"))
    seconds = [line["timing_s/step"] for line in RunDirectory.open(place).read_metrics()]
    first = first_steps(plan.config)
    assert len(seconds) == first + STEPS
    assert done.step_s == pytest.approx(sum(seconds[first:]) / STEPS)
    assert not (place / "checkpoints").exists()
