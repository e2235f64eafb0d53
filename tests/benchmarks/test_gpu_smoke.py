"""What can be known of `make gpu-smoke` and `make gpu-imports` without running them: rows, runs, uses of packages."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.imports import ROOT, Use, problem_of, uses_of
from benchmarks.gpu.smoke import runs
from benchmarks.gpu.smoke.__main__ import PAGE, STEPS
from benchmarks.gpu.smoke.place import Failed, Place
from benchmarks.gpu.smoke.record import Row, with_rows
from penstock.orchestrator.configuration.compose import load_config

ROW = Row("1. imports", "all | of it", "2026-01-01", "1x H100", "torch 2", "make gpu-smoke")


def rows_in(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(("| 1. ", "| 2. "))]


def test_a_row_takes_the_place_of_the_one_of_its_step_and_machine() -> None:
    page = PAGE.read_text()
    others = len(rows_in(page))
    first = with_rows(page, [ROW, replace(ROW, machine="no GPU; Zen")])
    again = with_rows(first, [replace(ROW, seen="less")])
    assert len(rows_in(first)) == len(rows_in(again)) == others + 2
    assert ("all / of it" in first, first.count("1x H100")) == (True, 1)
    assert ("| less |" in again, again.count("1x H100"), again.count("no GPU; Zen")) == (True, 1, 1)
    assert again.split("<!--")[0] == page.split("<!--")[0]


def test_runs_are_configured_for_the_gpus_that_there_are(tmp_path: Path) -> None:
    for num_gpus, share in ((0, 0.0), (1, 0.5)):
        place = Place(tmp_path, num_gpus)
        options = {"placement": "colocated", "checkpoint__every_steps": 1}
        config = load_config(runs.words(place, "run", 3, share=0.5, **options))
        assert (config.trainer.num_gpus_per_rank, config.rollout.num_gpus_per_worker) == (share, share)
        assert (config.placement, config.checkpoint.every_steps) == ("colocated", 1)


def test_what_needs_more_gpus_is_left_out_by_name_and_what_differs_fails(tmp_path: Path) -> None:
    place = Place(tmp_path, 1)
    assert place.needs(1, "ipc")
    assert not place.needs(2, "nccl")
    assert place.left_out == ["nccl (2 GPUs)"]
    place.near("weights", [1.0], [1.0 + 1e-9], 1e-6)
    for other in (1.1, float("nan")):
        with pytest.raises(Failed, match="weights: differs by"):
            place.near("weights", [1.0], [other], 1e-6)
    assert len(STEPS) == 10


def test_calls_of_functions_and_methods_are_found_with_their_arguments() -> None:
    engines = ROOT / "workers" / "trainer" / "engines"
    found = {(use.name, use.keywords) for use in uses_of(engines / "deepspeed.py") if use.is_call}
    assert ("DeepSpeedEngine.offload_states", ("include", "pin_memory")) in found
    assert any(use.name == "get_device_module" for use in uses_of(engines / "train_engine.py"))


def test_a_call_that_a_signature_does_not_take_is_told() -> None:
    use = Use("here", "torch", "distributed.new_group", 1, ("timeout",), is_call=True)
    assert problem_of(use) is None
    assert "otherwise" in str(problem_of(replace(use, keywords=("deadline",))))
    assert problem_of(replace(use, name="distributed.old_group")) == "torch has no distributed.old_group"
