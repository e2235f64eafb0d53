"""A whole run that trains rare successes again."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.orchestrator.session import session
from tests.run_files import metrics_of, samples_of

pytestmark = pytest.mark.real
BOUND = 2


def words_of(small_run: list[str], tmp_path: Path, name: str, *words: str) -> list[str]:
    return [*small_run, "rollout.engine=hf", f"max_staleness={BOUND}", "trainer.replay.share=0.5",
            "trainer.replay.steps=2", "trainer.replay.rare=0.5", "algorithm.group_size=4",
            "tracking.samples_every_steps=1", f"output_dir={tmp_path}", f"name={name}", *words]  # fmt: skip


def test_rare_successes_are_trained_again_also_by_a_run_that_goes_on(
    small_run: list[str], tmp_path: Path, cluster: str
) -> None:
    first = words_of(small_run, tmp_path, "first", "trainer.max_steps=4", "checkpoint.every_steps=4")
    run(load_config(first), quiet=True)
    second = words_of(small_run, tmp_path, "second", f"resume={tmp_path}/first", "trainer.max_steps=7")
    run(load_config(second), quiet=True)
    lines = [*metrics_of(tmp_path / "first"), *metrics_of(tmp_path / "second")]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    again = [line["replay/rows"] for line in lines]
    assert again[0] == 0
    assert sum(again[:4]) > 0
    assert again[4] > 0  # the resumed run has what the first one kept
    for line in lines:
        assert line["replay/staleness_max"] <= BOUND
        assert line["staleness/max"] <= BOUND
    trained = [row["row_id"] for name, step in (("first", 2), ("first", 3), ("second", 6))
               for row in samples_of(tmp_path / name, step)]  # fmt: skip
    assert len(trained) == len(set(trained))  # of its own, every step has rows of its own


def test_a_session_trains_the_rows_that_it_is_given(small_run: list[str], tmp_path: Path) -> None:
    config = load_config(words_of(small_run, tmp_path, "session"))
    with pytest.raises(ConfigError, match=r"trainer\.replay\.share=0\.5: a session"), session(config):
        pass
