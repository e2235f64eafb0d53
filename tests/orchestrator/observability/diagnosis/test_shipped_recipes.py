"""Recipes as they are shipped, but short: none is told that something is wrong with it. Longer ones are replayed in
`test_recorded_runs.py`."""

from pathlib import Path

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import RunResult, run
from tests.run_files import events_of, metrics_of

pytestmark = pytest.mark.real

SHORT = [
    "rollout.engine=hf", "trainer.num_threads=1", "diagnosis.window=5", "evaluation.every_steps=0",
    "checkpoint.every_steps=0", "tracking.samples_every_steps=0", "tracking.sinks=[]",
]  # fmt: skip
STEPS = 9


def ended(recipe: str, directory: Path, *words: str) -> RunResult:
    """The run, of which something is only ever hinted at."""
    config = load_config([f"recipe={recipe}", f"name={recipe}", f"output_dir={directory}", *SHORT, *words])
    result = run(config, quiet=True)
    warnings = [event["text"] for event in events_of(result.directory) if event["kind"] == "warning"]
    assert warnings == [], recipe
    return result


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, cluster: str) -> Path:
    """A model that answers some sums."""
    result = ended("sft", tmp_path_factory.mktemp("warm"), "trainer.max_steps=40")
    assert metrics_of(result.directory)[-1]["actor/padding_share"] < 0.5
    return result.model


@pytest.mark.parametrize("recipe", ["grpo", "dpo"])
def test_a_recipe_is_told_that_nothing_is_wrong(recipe: str, warm: Path, tmp_path: Path) -> None:
    result = ended(recipe, tmp_path, f"model.path={warm}", f"trainer.max_steps={STEPS}")
    lines = metrics_of(result.directory)
    assert len(lines) == STEPS
    if recipe != "dpo":
        assert max(line["reward/std"] for line in lines) > 0, "there was nothing to learn from"
