"""A run of some steps says how long responses are, and by what factor its cluster is slower than the cost model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.calibration import SPLIT, calibrated, read_pilot
from penstock.planner.cost_model import Efficiencies
from penstock.planner.lengths import Turns
from penstock.planner.plan_inputs import search_of
from penstock.planner.search import Search

WORDS = ("recipe=gsm8k", "model.path=Qwen/Qwen2.5-7B-Instruct", "rollout.max_model_len=4608",
         "rollout.sampling.max_tokens=4096", "trainer.groups_per_step=32", "max_staleness=1")  # fmt: skip


@pytest.fixture(scope="module")
def search() -> Search:
    return search_of(load_config(list(WORDS)), "2x8:h100", "1000")


def recorded(place: Path, search: Search, number: int, steps: int, more: dict[str, Any] | None = None) -> str:
    """A run of a plan whose engines took 1.5 times and whose ranks took 1.2 times as long as was estimated, after two
    slow steps."""
    plan = search.plans[number]
    config = replace(plan.config, output_dir=str(place), name="pilot")
    directory = RunDirectory.create(config)
    engines, ranks = 1.5 * plan.found.busy_s, 1.2 * plan.found.update_s
    for step in range(1, steps + 1):
        slow, seconds = 10 if step <= 2 else 1, max(engines, ranks) * 1.1
        line = {
            "step": step, "timing_s/step": seconds * slow, "timing_s/train": ranks * slow,
            "idle/rollout": 1 - engines / seconds, "response_length/mean": 700.0, "response_length/max": 4000.0,
        }  # fmt: skip
        directory.log_metrics(line | (more or {}))
    directory.close()
    return str(directory.path)


def test_the_factors_of_a_run_are_found_whatever_its_split_was(search: Search, tmp_path: Path) -> None:
    for number in (0, len(search.plans) // 2):
        pilot = read_pilot(recorded(tmp_path / str(number), search, number, 10))
        assert pilot.num_steps == 8
        assert pilot.keys.keys() >= {key for key in SPLIT if key != "trainer.shard_size"}
        found = calibrated(replace(search, lengths=search.lengths), replace(pilot, lengths=search.lengths))
        assert found.efficiencies.decode_factor == pytest.approx(1.5 * Efficiencies().decode_factor, rel=0.02)
        assert found.efficiencies.update_factor == pytest.approx(1.2, rel=0.02)
        again = found.plans[0]
        assert again.step_s > search.plans[0].step_s


def test_lengths_are_those_of_the_samples_and_else_of_the_metrics(search: Search, tmp_path: Path) -> None:
    place = recorded(tmp_path, search, 0, 5)
    assert read_pilot(place).lengths.mean == pytest.approx(700, rel=0.01)
    rows = {"prompt_ids": [[1] * 20] * 4, "response_ids": [[1] * length for length in (10, 20, 30, 40)]}
    RunDirectory.open(place).write_samples(3, pa.table(rows))
    found = read_pilot(place).lengths
    assert (found.mean, found.prompt) == (25, 20)


def test_turns_are_those_that_the_run_has_counted(search: Search, tmp_path: Path) -> None:
    """Ten attempts a step of four turns; before 30 of them 100 tokens were added, 2 s passed, and 1,000 tokens were
    there: a prompt of 550, half of 700 that are sampled, and half of 200."""
    counts = {
        "attempts_completed": 8, "attempts_failed": 2, "turns": 40, "tokens_added": 3000, "waited_ms": 60_000,
        "tokens_continued": 30_000, "tokens_reread": 3000,
    }  # fmt: skip
    more = {f"environment/{name}": float(value) for name, value in counts.items()}
    found = read_pilot(recorded(tmp_path, search, 0, 5, more)).lengths
    assert found.turns == Turns(4, added=100, wait_s=2.0, reread=0.1)
    assert found.prompt == pytest.approx(550, abs=2)
    assert read_pilot(recorded(tmp_path / "other", search, 0, 5)).lengths.turns == Turns()


def test_links_between_nodes_are_as_slow_as_they_were_measured(search: Search, tmp_path: Path) -> None:
    place = recorded(tmp_path, search, 0, 10)
    for rate in (2e9, 1e9):
        RunDirectory.open(place).event("link", source="Agent-a", target="Agent-b", bytes_per_s=rate)
    found = calibrated(search, read_pilot(place))
    assert found.link == 1e9
    plan = search.plans[0]
    slow = found.plan(plan.candidate).ranks.sync()
    assert slow.published_s >= plan.memory.publication_bytes / 1e9 > plan.ranks.sync().published_s


def test_a_run_without_gpus_gives_its_lengths_alone(search: Search, tmp_path: Path) -> None:
    pilot = read_pilot(recorded(tmp_path, search, 0, 5))
    found = calibrated(search, replace(pilot, keys=pilot.keys | {"trainer.num_gpus_per_rank": 0}))
    assert found.efficiencies == search.efficiencies
    assert found.lengths == pilot.lengths


def test_a_run_that_has_made_too_few_steps_is_refused(search: Search, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no steps after the first 2"):
        read_pilot(recorded(tmp_path, search, 0, 2))
    with pytest.raises(ConfigError, match="no run's records"):
        read_pilot(str(tmp_path / "nothing"))
