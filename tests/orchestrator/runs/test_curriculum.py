"""Whole runs with a curriculum: what they draw is the same however they were interrupted."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.orchestrator.session import session
from tests.run_files import metrics_of, samples_of

pytestmark = pytest.mark.real
STEPS = 8


def words_of(small_run: list[str], tmp_path: Path, name: str, *words: str) -> list[str]:
    """Eight rows, of which every fourth step draws each once more; those whose samples agree are passed over."""
    curriculum = ["data.curriculum.by=row", "data.curriculum.memory=2", "data.size=8", "algorithm.group_size=2"]
    return [*small_run, "rollout.engine=hf", *curriculum, "trainer.groups_per_step=2", f"trainer.max_steps={STEPS}",
            "tracking.samples_every_steps=1", f"output_dir={tmp_path}", f"name={name}", *words]  # fmt: skip


def drawn(directory: Path) -> list[list[str]]:
    """The prompts of each step that it has taken."""
    steps = [line["step"] for line in metrics_of(directory)]
    return [[str(row["prompt_ids"]) for row in samples_of(directory, step)] for step in steps]


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(small_run: list[str], tmp_path: Path, cluster: str) -> None:
    whole = run(load_config(words_of(small_run, tmp_path, "whole")), quiet=True)
    first = words_of(small_run, tmp_path, "first", "trainer.max_steps=5", "checkpoint.every_steps=5")
    run(load_config(first), quiet=True)
    second = words_of(small_run, tmp_path, "second", f"resume={tmp_path}/first")
    resumed = run(load_config(second), quiet=True)
    expected = drawn(whole.directory)
    assert drawn(tmp_path / "first") == expected[:5]
    assert drawn(resumed.directory) == expected[5:]
    lines, others = metrics_of(whole.directory), metrics_of(resumed.directory)
    assert lines[-1]["reward/mean"] == others[-1]["reward/mean"]
    assert lines[-1]["actor/grad_norm"] == others[-1]["actor/grad_norm"]
    assert lines[-1]["curriculum/passed_over"] > 0


def test_where_nothing_is_rewarded_or_drawn_by_the_run_it_is_refused(small_run: list[str], tmp_path: Path) -> None:
    config = load_config(words_of(small_run, tmp_path, "session"))
    with (
        pytest.raises(ConfigError, match=r"data\.curriculum\.by=row: a session draws its prompts itself"),
        session(config),
    ):
        pass
    with pytest.raises(ConfigError, match=r"data\.curriculum\.by=row: algorithm=sft rewards nothing"):
        run(load_config(words_of(small_run, tmp_path, "sft", "algorithm=sft", "algorithm.group_size=1")), quiet=True)
