"""Run directories in every bad state: each is answered about, and none keeps the others from being."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from starlette.testclient import TestClient

from penstock.orchestrator.observability.runs.found import MAX_CHARACTERS, MAX_RUNS, Runs
from penstock.ui import answers as answers_module
from penstock.ui.answers import Answers
from penstock.ui.app import make_app
from penstock.ui.rollouts import SampleFilter
from tests.ui.made_runs import HERE, make_run, steps, write_samples

NOBODY = 65534


@pytest.fixture
def page(tmp_path: Path) -> Iterator[TestClient]:
    make_run(tmp_path / "good", "start", "end", metrics=steps(3))
    with TestClient(make_app(tmp_path), base_url="http://localhost:8420") as client:
        yield client


def lines(page: TestClient) -> dict[str, dict[str, Any]]:
    """Lines of the table by run. The good run is always among them."""
    found = {line["id"]: line for line in page.get("/api/runs").json()}
    assert found["good"]["step"] == 3
    return found


def asked(page: TestClient, what: str, **parameters: Any) -> Any:
    answer = page.get(f"/api/{what}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


ODD_CONFIGS = {
    "empty": "",
    "no mapping": "- 1\n- 2\n",
    "sections that are none": "algorithm: grpo\ntrainer: 5\nmodel: [a]\nrecipe: {}\nmax_staleness: many\n",
    "unknown keys": "future: {thing: [1, 2]}\nalgorithm: {name: unheard_of, knob: 3}\nname: 2026-01-01\n",
    "no numbers": "seed: .nan\nmax_staleness: .inf\ntrainer: {max_steps: .nan}\nalgorithm: {name: 7}\n",
    "no date": "when: 2026-99-99\n",
    "keys of every kind": "1: a\n2.5: b\nnull: c\ntrue: d\n? [1, 2]\n: e\n",
    "half": "name: [unclosed",
}


@pytest.mark.parametrize("text", ODD_CONFIGS.values(), ids=list(ODD_CONFIGS))
def test_a_configuration_of_another_version_is_a_run_all_the_same(page: TestClient, tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "odd", "start", metrics=steps(2))
    (run / "config.yaml").write_text(text)
    assert lines(page)["odd"]["step"] == 2
    assert asked(page, "run", run="odd")["num_steps"] == 2
    assert asked(page, "compare", run=["good", "odd"])["runs"].keys() == {"good", "odd"}
    assert asked(page, "samples", run="odd")["files"] == 0


def test_lines_that_are_none_or_half_or_hold_no_numbers_are_left_out(page: TestClient, tmp_path: Path) -> None:
    run = make_run(tmp_path / "odd", "start")
    written = [
        '{"step": 1, "reward/mean": 0.5, "accuracy/heldout": 0.25}', '{"step": 2, "reward/mean": NaN}',
        '{"step": 3, "reward/mean": Infinity, "more": "text"}', '{"step": NaN}', '{"step": "four"}', "[5]", "null",
        "[" * 100_000, '{"entropy": 1}', '{"step": 6, "reward/mean": {"deep": 1}}', '{"step": 7, "reward/mea',
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join(written))
    (run / "events.jsonl").write_text(
        '{"time": 5, "kind": 7, "value": NaN}\n{"kind": "start"}\n3\nnot json\n'
        '{"time": "2026-01-01T00:00:00", "kind": "failed", "message": ["a", {"b": 1}]}\n{"kind": "en'
    )
    line = lines(page)["odd"]
    assert (line["step"], line["accuracy"], line["reward"], line["state"]) == (6, 0.25, 0.5, "failed")
    found = asked(page, "run", run="odd")
    assert (found["num_steps"], found["num_unreadable"]) == (4, 6)
    assert found["events"][0]["value"] is None
    assert asked(page, "series", run="odd", key="reward/mean")["reward/mean"] == {"steps": [1], "mean": [0.5]}


def test_a_run_without_metrics_events_or_steps_is_one_too(page: TestClient, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("name: bare\n")
    make_run(tmp_path / "begun", "start", holder=HERE)
    for name, state in (("bare", "unfinished"), ("begun", "running")):
        assert (lines(page)[name]["state"], lines(page)[name]["step"]) == (state, None)
        assert asked(page, "run", run=name)["charts"] == []
        assert asked(page, "series", run=name, key="reward/mean")["reward/mean"]["steps"] == []


def test_of_an_empty_place_there_are_no_runs(tmp_path: Path) -> None:
    with TestClient(make_app(tmp_path), base_url="http://localhost") as page:
        assert page.get("/api/runs").json() == []
        assert page.get("/api/compare").json()["runs"] == {}
    assert Answers(tmp_path / "nowhere").table() == []


def test_samples_that_are_being_written_are_left_out_and_counted(page: TestClient, tmp_path: Path) -> None:
    samples = tmp_path / "good" / "samples"
    for step in (1, 2, 3):
        write_samples(samples, step, [{"group": step, "reward": 1.0}])
    whole = (samples / "step_2.parquet").read_bytes()
    (samples / "step_2.parquet").write_bytes(whole[: len(whole) // 2])  # no footer
    (samples / "step_3.parquet").write_bytes(b"")
    (samples / "step_4.parquet.part").write_bytes(whole[:9])
    parquet.write_table(pa.table({"reward": [None, float("nan")], "step": ["x", "y"]}), samples / "step_5.parquet")
    parquet.write_table(pa.table({"reward": ["a"], "response_ids": [3]}), samples / "step_6.parquet")
    for _ in range(5):  # one answer takes up as many files as it has time for, at least one
        found = asked(page, "samples", run="good", sort="reward")
    assert (found["known"], found["files"]) == (5, 5)
    assert (found["total"], found["unreadable"]) == (3, 3)
    assert [row["step"] for row in found["rows"]] == [1, 5, 5]
    assert found["rows"][1]["reward"] is None
    assert asked(page, "sample", run="good", step=5, place=1)["reward"] is None
    assert page.get("/api/sample", params={"run": "good", "step": 2, "place": 0}).status_code == 404


def test_a_run_that_is_removed_is_gone_and_the_others_are_not(page: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path / "gone", "start", metrics=steps(2))
    assert asked(page, "run", run="gone")["num_steps"] == 2
    shutil.rmtree(tmp_path / "gone")
    assert set(lines(page)) == {"good"}
    for what in ("run", "series", "samples", "sample"):
        answer = page.get(f"/api/{what}", params={"run": "gone", "step": 1, "place": 0, "key": "reward/mean"})
        assert (answer.status_code, "no run 'gone'" in answer.json()["error"]) == (404, True)
    make_run(tmp_path / "gone", "start", metrics=steps(5))  # another of the same name
    assert asked(page, "run", run="gone")["num_steps"] == 5


def test_a_run_that_may_not_be_read_has_a_line_that_says_so() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = Path(folder)
        place.chmod(0o755)
        make_run(place / "good", "start", metrics=steps(3))
        make_run(place / "closed", "start").chmod(0)
        secret = make_run(place / "secret", "start")
        (secret / "config.yaml").chmod(0)
        make_run(place / "hidden", "start", metrics=steps(1))
        (place / "hidden" / "metrics.jsonl").chmod(0)
        answers = Answers(place)
        with as_nobody():
            found = {line["id"]: line for line in answers.table()}
            for run in ("secret", "hidden"):
                with pytest.raises(PermissionError):
                    answers.opened(run).described()
        (place / "closed").chmod(0o700)
    assert found["good"]["step"] == 3
    assert "closed" not in found  # nobody can tell whether it is a run
    for run in ("secret", "hidden"):
        assert (found[run]["state"], "Permission denied" in found[run]["error"]) == ("unreadable", True)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root reads whatever it likes."""
    user = os.geteuid()
    os.seteuid(NOBODY if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


def test_files_that_cannot_be_read_are_an_answer_and_no_failure(page: TestClient, tmp_path: Path) -> None:
    run = make_run(tmp_path / "odd", "start")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert lines(page)["odd"]["state"] == "unreadable"
    answer = page.get("/api/run", params={"run": "odd"})
    assert (answer.status_code, "no plain file" in answer.json()["error"]) == (503, True)


def test_names_and_texts_without_an_end_are_cut(page: TestClient, tmp_path: Path) -> None:
    endless = "x" * 100_000
    run = make_run(tmp_path / "odd", config=f"description: {endless}\n")
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("name: odd", f"name: {endless}", 1))
    (run / "events.jsonl").write_text(json.dumps({"kind": "failed", "message": endless}) + "\n")
    write_samples(run / "samples", 1, [{"group": 0, "reward": 1.0, "text": endless}])
    line = lines(page)["odd"]
    assert len(line["name"]) == len(line["error"]) == MAX_CHARACTERS
    assert len(asked(page, "run", run="odd")["description"]) == MAX_CHARACTERS
    assert len(asked(page, "samples", run="odd")["rows"][0]["response_text"]) < 1000


def test_of_very_many_runs_the_newest_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(8):
        os.utime(make_run(tmp_path / f"run{index}", "start"), (index, index))
    assert MAX_RUNS >= 1000
    monkeypatch.setattr("penstock.orchestrator.observability.runs.found.MAX_RUNS", 3)
    assert {line.id for line in Runs(tmp_path).lines()} == {"run5", "run6", "run7"}


def test_a_name_that_is_no_text_stops_nothing(page: TestClient, tmp_path: Path) -> None:
    make_run(tmp_path / "odd", "start", metrics=steps(1)).rename(tmp_path / os.fsdecode(b"odd\xff"))
    assert len(lines(page)) == 2


def test_a_slow_look_at_one_run_keeps_nobody_from_another(tmp_path: Path) -> None:
    for name in ("slow", "quick"):
        make_run(tmp_path / name, "start", metrics=steps(2))
        write_samples(tmp_path / name / "samples", 1, [{"group": 0, "reward": 1.0}])
    answers = Answers(tmp_path)
    opened = answers.opened("slow")
    with opened._reading_samples:  # somebody looks for a text in a million samples
        blocked = threading.Thread(target=opened.samples, args=(SampleFilter(),))
        blocked.start()
        assert answers.opened("quick").samples(SampleFilter())["total"] == 1
        assert answers.opened("slow").described()["num_steps"] == 2
        assert blocked.is_alive()
    blocked.join(10)
    assert not blocked.is_alive()


def test_numbers_of_runs_that_nobody_looks_at_any_more_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        make_run(tmp_path / f"run{index}", "start", metrics=steps(index + 1))
    monkeypatch.setattr(answers_module, "MAX_RUNS", 2)
    answers = Answers(tmp_path)
    assert [answers.opened(f"run{index}").described()["num_steps"] for index in (0, 1, 2, 3, 0)] == [1, 2, 3, 4, 1]
    assert len(answers._open) == 2
