"""Samples of a step are written whole, or told to be lost."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algorithms.catalogue import build_dataflow, dataflow_of, in_environment, with_pictures
from penstock.conf.errors import DeadlineExceeded, WorkerDied
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.sample_log import SampleLog, with_token_values
from penstock.orchestrator.run_directory.picture_folder import name_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.data.rows import Rows
from penstock.workers.agents.trajectory import Trajectory, Turn, row_columns
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.trainer.step_report import TokenValues
from tests.fakes.actors import FakeHandle
from tests.run_files import samples_of


@pytest.mark.parametrize(("there", "is_written"), [(16, True), (8, False), (0, False)])
def test_samples_that_are_partly_lost_with_a_node_are_told_and_not_written(
    there: int, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run", "tracking.samples_every_steps=2"])
    directory, written = RunDirectory.create(config), list[int]()
    monkeypatch.setattr(directory, "write_samples", lambda step, rows: written.append(step))

    async def last_batch(columns: list[str]) -> Any:
        assert {"response_ids", "reward"} <= set(columns)
        return Rows.from_lists({"reward": [0.0] * there})

    log = SampleLog(config, build_dataflow(config.algorithm), directory, last_batch, list)
    assert [log.is_due(step) for step in (1, 2, 3)] == [True, False, True]

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


def test_fetched_samples_are_written_though_the_run_is_cancelled(
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
    """The log of a run that writes the samples of every step by `write`."""
    config = load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run", "tracking.samples_every_steps=1"])
    directory = RunDirectory.create(config)
    directory.close()
    monkeypatch.setattr(directory, "write_samples", write)

    async def last_batch(columns: list[str]) -> Rows:
        return Rows.from_lists({"reward": [1.0] * 16})

    return SampleLog(config, build_dataflow(config.algorithm), directory, last_batch, list)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_token_values_of_ranks_go_to_their_rows_and_the_rest_is_null() -> None:
    rows = Rows.from_lists({"reward": [1.0, 2.0, 3.0]})
    first = TokenValues(np.array([2]), [floats(-1.0, np.nan)], [np.array([True, False])], [floats(np.nan, 0.5)])
    second = TokenValues(np.array([0]), [None], [np.array([True])], [None])
    table = with_token_values(rows, [first, second])
    assert table["trainer_logprobs"].to_pylist() == [None, None, [-1.0, None]]
    assert table["loss_mask"].to_pylist() == [[True], None, [True, False]]
    assert table["advantage"].to_pylist() == [None, None, [None, 0.5]]
    whole = with_token_values(rows.with_column("advantage", [1.0, 0.0, -1.0]), [first])
    assert whole["advantage"].to_pylist() == [1.0, 0.0, -1.0]  # which the store has
    assert with_token_values(rows, []).column_names == ["group_id", "row_id", "reward"]
    assert with_token_values(rows, [second]).column_names == ["group_id", "row_id", "reward", "loss_mask"]


@pytest.mark.parametrize("gone", [None, WorkerDied("it is gone"), DeadlineExceeded("it is late")])
def test_a_rank_that_does_not_know_the_step_costs_its_columns_but_no_samples(gone: Any, tmp_path: Path) -> None:
    config = load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run"])
    directory = RunDirectory.create(config)

    async def last_batch(columns: list[str]) -> Rows:
        return Rows.from_lists({"reward": [1.0, 2.0]})

    known = TokenValues(np.array([1]), [floats(-2.0)], [np.ones(1, bool)], [None])
    ranks = [("Trainer-0", FakeHandle(token_values=gone)), ("Trainer-1", FakeHandle(token_values=known))]
    log = SampleLog(config, build_dataflow(config.algorithm), directory, last_batch, lambda: ranks)
    asyncio.run(log.write(1, 2))
    directory.close()
    assert [row["trainer_logprobs"] for row in samples_of(directory.path, 1)] == [None, [-2.0]]


SQUARE, CIRCLE = b"\x89PNG a square", b"\xff\xd8 a circle"


def seeing(path: Path, *words: str, seen: Rows | None = None) -> tuple[RunDirectory, SampleLog, list[list[str]]]:
    """A run whose rows have pictures, its log, and what columns the log asks for. `seen`: rows of an environment."""
    config = load_config(
        ["recipe=arithmetic", f"output_dir={path}", "name=run", "tracking.samples_every_steps=1", *words]
    )
    flow = with_pictures(
        build_dataflow(config.algorithm) if seen is None else in_environment(build_dataflow(config.algorithm))
    )
    directory, asked = RunDirectory.create(config), list[list[str]]()
    columns_of_prompts = {"reward": [1.0, 2.0], "pictures": [[SQUARE, CIRCLE, SQUARE], [CIRCLE]]}
    there = Rows.from_lists(columns_of_prompts) if seen is None else seen

    async def last_batch(columns: list[str]) -> Rows:
        asked.append(columns)
        return Rows(there.row_ids, there.group_ids, there.table().select([one for one in columns if one in there]))

    return directory, SampleLog(config, flow, directory, last_batch, list), asked


async def written(log: SampleLog, *steps: int, num_rows: int = 2) -> None:
    for step in steps:
        await log.write(step, num_rows)
    await log.flush()


def test_pictures_are_kept_once_and_rows_name_them(tmp_path: Path) -> None:
    directory, log, _ = seeing(tmp_path)
    asyncio.run(written(log, 1, 2))
    directory.close()
    for step in (1, 2):
        named = [row["pictures"] for row in samples_of(directory.path, step)]
        assert named == [list(map(name_of, [SQUARE, CIRCLE, SQUARE])), [name_of(CIRCLE)]]
    files = {file.name: file.read_bytes() for file in (directory.path / "pictures").iterdir()}
    assert files == {name_of(SQUARE): SQUARE, name_of(CIRCLE): CIRCLE}


def test_parts_of_a_conversation_count_by_the_names_of_its_row(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": picture} for picture in (SQUARE, CIRCLE, SQUARE)]
    reads = [
        PromptPictures(tuple(part["image"] for part in parts[:count]), ((0, 1), (2, 1), (4, 1))[:count])
        for count in (1, 3)
    ]
    turns = [
        Turn(number, None, {"content": "on"}, [], [7] * 5, [8], [-1.0], [0], "stop", pictures=read)
        for number, read in enumerate(reads)
    ]
    said = [{"role": "user", "content": parts[:1]}, {"role": "user", "content": parts[1:]}]
    columns = row_columns([Trajectory(turns, said=said)])
    directory, log, _ = seeing(tmp_path, seen=Rows.from_lists(columns))
    asyncio.run(written(log, 1, num_rows=1))
    directory.close()
    (row,) = samples_of(directory.path, 1)
    numbers = [part["picture"] for message in json.loads(row["transcript"]) for part in message["content"]]
    assert [row["pictures"][number] for number in numbers] == list(map(name_of, [SQUARE, CIRCLE, SQUARE]))
    assert (row["pictures"], "seen_pictures" in row) == ([name_of(SQUARE), name_of(CIRCLE)], False)


def test_once_pictures_are_too_many_they_are_not_asked_for_and_that_is_told(tmp_path: Path) -> None:
    room = len(SQUARE) / 2**30
    directory, log, asked = seeing(tmp_path, f"tracking.pictures_gib={room!r}")
    for step in (1, 2):
        asyncio.run(written(log, step))
    directory.close()
    assert ["pictures" in columns for columns in asked] == [True, False]
    (row, _) = samples_of(directory.path, 1)
    assert row["pictures"] == [name_of(SQUARE), None, name_of(SQUARE)]
    assert "pictures" not in samples_of(directory.path, 2)[0]
    told = [event for event in directory.read_events() if event["kind"] == "pictures_left_out"]
    assert [(event["step"], "tracking.pictures_gib" in event["reason"]) for event in told] == [(1, True)]


def test_a_run_of_text_has_no_folder_of_pictures(tmp_path: Path) -> None:
    config = load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run", "tracking.samples_every_steps=1"])
    directory = RunDirectory.create(config)

    async def last_batch(columns: list[str]) -> Rows:
        assert not [name for name in columns if "pictures" in name]
        return Rows.from_lists({"reward": [1.0, 2.0]})

    asyncio.run(written(SampleLog(config, build_dataflow(config.algorithm), directory, last_batch, list), 1))
    directory.close()
    assert "pictures" not in samples_of(directory.path, 1)[0]
    assert not (directory.path / "pictures").exists()


def test_columns_of_ones_own_are_written_where_they_have_one_value_a_sample(tmp_path: Path) -> None:
    rewards = "[{function: digits}, {function: label, name: mine}]"
    config = load_config(["recipe=arithmetic", f"output_dir={tmp_path}", "name=run", f"rewards={rewards}"])
    directory, asked = RunDirectory.create(config), list[str]()

    async def last_batch(columns: list[str]) -> Any:
        asked.extend(columns)
        return Rows.from_lists({"reward": [0.5, 0.5], "reward_mine": [1.0, 2.0], "reward_digits": [float("nan"), 0.0]})

    asyncio.run(written(SampleLog(config, dataflow_of(config), directory, last_batch, list), 1))
    directory.close()
    assert {"reward_mine", "reward_digits"} <= set(asked)
    assert samples_of(directory.path, 1)[0]["reward_mine"] == 1.0
