"""Samples of a step are written whole, or told to be lost."""

import asyncio
import threading
from collections.abc import Callable
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
        await log.flush()

    asyncio.run(body())
    directory.close()
    assert written == ([1, 3] if is_written else [])
    told = [(event["step"], event["reason"]) for event in directory.read_events() if event["kind"] == "samples_lost"]
    reason = f"{16 - there} of 16 rows were with a store or a node that was lost"
    assert told == ([] if is_written else [(1, reason), (3, reason)])


def test_steps_are_written_in_order_by_a_thread_while_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, written = threading.Event(), list[int]()

    def write(step: int, rows: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert may_write.wait(30)
        written.append(step)

    log = log_of(tmp_path, write, monkeypatch)

    async def body() -> None:
        await log.write(1, 16)  # returns while its file is not written
        later = asyncio.create_task(log.write(2, 16))
        await asyncio.sleep(0)
        assert not written
        may_write.set()
        await later
        assert written[0] == 1
        await log.flush()
        assert written == [1, 2]

    asyncio.run(body())


def test_what_was_fetched_is_written_though_the_run_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[int]()
    log = log_of(tmp_path, lambda step, rows: written.append(step), monkeypatch)

    async def body() -> None:
        await log.write(1, 16)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(body())
    assert written == [1]


def test_a_failure_that_is_no_disk_s_is_raised_and_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(step: int, rows: Any) -> None:
        raise ValueError("no table")

    log = log_of(tmp_path, write, monkeypatch)

    async def body() -> None:
        await log.write(1, 16)
        await log.flush()

    with pytest.raises(ValueError, match="no table"):
        asyncio.run(body())


def log_of(tmp_path: Path, write: Callable[[int, Any], None], monkeypatch: pytest.MonkeyPatch) -> SampleLog:
    """Of a run that writes the samples of every step by `write`."""
    config = load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run", "tracking.samples_every_steps=1"])
    directory = RunDirectory.create(config)
    directory.close()
    monkeypatch.setattr(directory, "write_samples", write)

    async def last_batch(columns: list[str]) -> Any:
        return [None] * 16

    return SampleLog(config, build_dataflow(config.algorithm), directory, last_batch)
