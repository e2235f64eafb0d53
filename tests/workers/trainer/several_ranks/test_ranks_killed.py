"""Two ranks, one of which is killed while it copies its state: both go on from the step before, bit for bit."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.workers.fresh_model import build_fresh_model
from tests.rank_processes import run_ranks
from tests.workers.trainer.conftest import FRESH, assert_same
from tests.workers.trainer.several_ranks import ranks_killed as ranks

pytestmark = pytest.mark.real
KILLED_STATUS = 137
"""Status of a process that a warm one lives for, when that was killed."""
RANKS = (0, 1)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Path:
    """The directory of what both pairs of processes wrote."""
    directory, model = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("model")
    build_fresh_model(model, replace(FRESH, num_heads=8, num_kv_heads=4), seed=3)
    command = [*warm_python, "-m", ranks.__name__]
    run_ranks(command, 2, "first", model, directory, statuses=[0, KILLED_STATUS])
    run_ranks(command, 2, "second", model, directory)
    return directory


@cache
def result(directory: Path, life: str, rank: int) -> dict[str, Any]:
    return torch.load(directory / f"{life}.{rank}.pt")


@pytest.mark.parametrize("rank", RANKS)
def test_a_copy_within_which_its_rank_was_killed_is_none(lives: Path, rank: int) -> None:
    assert result(lives, "second", rank)[ranks.KILLED]["steps"] == [[2, 3], [2]][rank]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("scenario", [name for name in ranks.SCENARIOS if name != ranks.KILLED])
@pytest.mark.parametrize("when", ["at 2", "at 3"])
def test_new_ranks_go_on_as_the_dead_ones_would_have(lives: Path, scenario: str, when: str, rank: int) -> None:
    expected, ours = (result(lives, life, rank)[scenario] for life in ("first", "second"))
    assert_same(ours[when], expected[when])
    assert not any(torch.equal(ours["at 3"][name], ours["at 2"][name]) for name in ours["at 3"] if "counters" in name)


def test_after_a_kill_both_ranks_have_the_step_before_and_make_the_same_update(lives: Path) -> None:
    """The scenario is the first of all, but for the kill: rank 1 was never heard of its third update again."""
    for rank in RANKS:
        ours = result(lives, "second", rank)[ranks.KILLED]
        expected = result(lives, "first", rank)["fsdp"]
        assert_same(without_random(ours["at 2"]), without_random(expected["at 2"]))
        assert_same(without_random(ours["at 3"]), without_random(expected["at 3"]))


def without_random(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The generator has been used by the trainers before."""
    return {name: values for name, values in state.items() if not name.startswith("rng")}


@pytest.mark.parametrize("rank", RANKS)
def test_copies_of_one_step_made_by_others_than_each_other_are_no_state(lives: Path, rank: int) -> None:
    assert "copies of step 3 are not of one state" in result(lives, "second", rank)["mixed"]
