"""Samples of a step are written whole, or told to be lost."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.algorithms.catalogue import build_dataflow
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recording.run_directory import RunDirectory
from penstock.orchestrator.reporting.sample_log import SampleLog


@pytest.mark.parametrize(("there", "is_written"), [(16, True), (8, False), (0, False)])
def test_samples_of_which_some_were_on_a_lost_node_are_told_and_not_written(
    there: int, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run", "tracking.samples_every_steps=2"])
    directory, written = RunDirectory.create(config), list[int]()
    monkeypatch.setattr(directory, "write_samples", lambda step, rows: written.append(step))

    async def last_batch(columns: list[str]) -> Any:
        assert {"response_ids", "reward"} <= set(columns)
        return [None] * there

    log = SampleLog(config, build_dataflow(config.algorithm), directory, last_batch)

    async def body() -> None:
        for step in (1, 2, 3):
            await log.write(step, 16)

    asyncio.run(body())
    directory.close()
    assert written == ([1, 3] if is_written else [])
    told = [(event["step"], event["reason"]) for event in directory.read_events() if event["kind"] == "samples_lost"]
    reason = f"{16 - there} of 16 rows were with a store or a node that was lost"
    assert told == ([] if is_written else [(1, reason), (3, reason)])
