"""What the benchmark of a curriculum makes of its runs."""

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from benchmarks import curriculum
from penstock.orchestrator.run_directory.run_directory import RunDirectory


def run_of(side: str, steps: int, groups: float, flat: float, reached: bool = True) -> dict[str, Any]:
    return {"side": side, "steps": steps, "groups": groups, "flat": flat, "reached": reached, "best": 0.85}


ROUNDS = [
    run_of("uniform", 40, 80, 0.5), run_of("uniform", 60, 120, 0.7),
    run_of("curriculum", 20, 40, 0.25), run_of("curriculum", 40, 80, 0.23, reached=False),
    run_of("uniform, refilled", 20, 100, 0.6), run_of("curriculum, refilled", 19, 70, 0.3),
]  # fmt: skip


def test_a_curriculum_is_compared_with_uniform_sampling_of_its_kind() -> None:
    targets = curriculum.targets_of(ROUNDS)
    assert [target.value for target in targets] == pytest.approx([30 / 50, 0.24 / 0.6, 70 / 100])
    assert [target.met for target in targets] == [True, True, False]


def test_a_run_that_does_not_reach_the_goal_says_how_near_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    curriculum.print_rounds(ROUNDS)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["curriculum", "20, more (85%)", "60", "24%"] in rows


def test_groups_with_equal_rewards_are_counted_step_by_step(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.samples.mkdir()
    for step, rewards in ((10, [0.0, 1.0, 1.0, 0.0]), (2, [1.0, 1.0, 0.0, 1.0])):
        rows = pyarrow.table({"group_id": [7, 7, 9, 9], "reward": rewards})
        parquet.write_table(rows, directory.samples / f"step_{step}.parquet")
    assert curriculum.flat_groups(directory) == [0.5, 0.0]
