"""Run directories that somebody else wrote: they harm neither the page nor other runs, and show nothing but their own
files."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from starlette.datastructures import QueryParams
from starlette.testclient import TestClient

from penstock.orchestrator.observability.runs.columns import Columns
from penstock.ui.answers import QUESTIONS, Answers
from penstock.ui.app import as_json, make_app
from penstock.ui.rollouts import MANY
from tests.amounts import amount
from tests.ui.made_runs import make_run, steps, write_samples

SECRET = "hunter2"
LOCAL = "http://localhost:8420"
LARGE = 1 << 20


@pytest.fixture
def page(tmp_path: Path) -> Iterator[TestClient]:
    make_run(tmp_path / "good", "start", "end", metrics=steps(3))
    with TestClient(make_app(tmp_path), base_url=LOCAL) as client:
        yield client


def answers_about(page: TestClient, run: str) -> dict[str, Any]:
    """The text of every answer there is about a run, each of which is one. The good run is always in the table."""
    told = {"runs": page.get("/api/runs")}
    good = next(line for line in told["runs"].json() if line["id"] == "good")
    assert good["step"] == 3
    for name in ("run", "compare", "series", "samples", "sample", "timeline", "state", "logs"):
        told[name] = page.get(f"/api/{name}", params={"run": run, "key": "reward/mean", "step": 1, "place": 0})
        told[name].json()
    assert {name for name, answer in told.items() if answer.status_code not in (200, 404, 503)} == set()
    return {name: answer.text for name, answer in told.items()}


ODD_CONFIGS = {
    "bool": "!!bool maybe",
    "int": "!!int ''",
    "float": "!!float ''",
    "time": "!!timestamp x",
    "cycle": "a: &a [*a]",
    "cycle of mappings": "a: &a {b: *a}",
    "large number": "seed: 0x" + "f" * 10_000,
    "larger than a float": "seed: 0x" + "f" * 300,
    "sexagesimal": "seed: 1" + ":1" * 195 + ".5",
    "long sexagesimal": "seed: 1" + ":1" * 160_000,
    "large name": "name: 0x" + "f" * 10_000,
    "deep": "a: " + "[" * 500 + "]" * 500,
    "without an end": "[" * 1_000_000,
    "deep blocks": "- " * 200_000,
    "link of links": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "merge of merges": "a: &a {x: 1}\n" + "".join(
        f"{new}: &{new} {{<<: [{','.join([f'*{old}'] * 9)}]}}\n"
        for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "long": "a: " + "x" * (1 << 25),
}  # fmt: skip


@pytest.mark.parametrize("text", ODD_CONFIGS.values(), ids=list(ODD_CONFIGS))
def test_an_odd_configuration_harms_no_run_and_no_answer(page: TestClient, tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "odd", "start", metrics=steps(2))
    (run / "config.yaml").write_text(text)
    told = answers_about(page, "odd")
    assert max(map(len, told.values())) < LARGE
    assert json.loads(told["run"])["num_steps"] == 2
    assert {line["id"]: line["step"] for line in json.loads(told["runs"])} == {"good": 3, "odd": 2}


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "events.jsonl", "metrics.jsonl", "spans.jsonl", "state.json", "run.lock", "samples/step_1.parquet",
     "logs/Store.log", "model/tokenizer.json", "samples", "logs", "model"],
)  # fmt: skip
def test_a_link_is_not_followed(page: TestClient, tmp_path: Path, name: str) -> None:
    """A link to another place of the same kind is not followed either."""
    elsewhere = make_run(tmp_path.parent / f"{tmp_path.name}-elsewhere", "start", config=f"description: {SECRET}\n")
    for file, line in (
        ("events.jsonl", {"kind": "failed", "message": SECRET}),
        ("metrics.jsonl", {"step": 1, SECRET: 1, "reward/mean": 1}),
        ("spans.jsonl", {"step": 1, "spans": SECRET}),
        ("state.json", {"members": SECRET}),
        ("run.lock", {"pid": os.getpid(), "host": SECRET}),
    ):
        (elsewhere / file).write_text(json.dumps(line) + "\n")
    write_samples(elsewhere / "samples", 1, [{"group": 3, "reward": 1.0, "text": SECRET}])
    (elsewhere / "logs").mkdir()
    (elsewhere / "logs" / "Store.log").write_text(f"2026-01-01T00:00:00Z out {SECRET}\n")
    (elsewhere / "model").mkdir()
    (elsewhere / "model" / "tokenizer.json").write_text(WORDS)
    run = make_run(tmp_path / "odd", "start", metrics=steps(1))
    write_samples(run / "samples", 1, [{"group": 0, "reward": 1.0}])
    for folder in ("logs", "model"):
        (run / folder).mkdir()
    place = run / name
    if place.is_dir():
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to(elsewhere / name)
    assert not [what for what, text in answers_about(page, "odd").items() if SECRET in text]


WORDS = json.dumps({
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": None, "truncation": None, "padding": None,
    "model": {"type": "WordLevel", "vocab": {SECRET: 0}, "unk_token": SECRET},
})  # fmt: skip


def test_a_pipe_in_place_of_a_file_holds_nobody_up(page: TestClient, tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    run = make_run(tmp_path / "odd", "start")
    for folder in ("samples", "logs", "model"):
        (run / folder).mkdir()
    for name in ("events.jsonl", "metrics.jsonl", "spans.jsonl", "state.json", "run.lock", "samples/step_1.parquet",
                 "logs/Store.log", "model/tokenizer.json"):  # fmt: skip
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    answers_about(page, "odd")


def test_a_place_that_links_to_itself_is_no_run(page: TestClient, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert page.get("/api/run", params={"run": "loop"}).status_code == 404


def test_a_lock_tells_of_processes_and_of_no_other_path(page: TestClient, tmp_path: Path) -> None:
    for pid in ("../etc/passwd", "a" * 5000, ["x"], 10**400):
        run = make_run(tmp_path / f"odd{len(str(pid))}", "start", holder={"pid": pid, "host": os.uname().nodename})
        line = next(line for line in page.get("/api/runs").json() if line["id"] == run.name)
        assert line["state"] == "lost"


@pytest.mark.parametrize("name", ["state.json", "spans.jsonl", "events.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"step": 1, "a": ' + "[" * 800 + "]" * 800 + ', "b": NaN}', '{"step": ' + "1" * 5000 + ", ",
     '{"step": ' + "1" * 4000 + "}", "\udcff\x00"],
    ids=["deep", "nearly too deep", "long number", "large number", "no text"],
)  # fmt: skip
def test_json_of_every_kind_is_answered_about(page: TestClient, tmp_path: Path, name: str, text: str) -> None:
    run = make_run(tmp_path / "odd", "start")
    (run / name).write_bytes((text + "\n").encode(errors="surrogateescape"))
    answers_about(page, "odd")


def test_a_line_without_an_end_is_no_line(page: TestClient, tmp_path: Path) -> None:
    run = make_run(tmp_path / "odd", "start")
    for name in ("metrics.jsonl", "spans.jsonl"):
        (run / name).write_bytes(b'{"step": 1, "a": "' + b"x" * (40 << 20) + b'"}\n{"step": 2, "reward/mean": 1}\n')
    told = answers_about(page, "odd")
    assert (json.loads(told["run"])["num_steps"], json.loads(told["run"])["num_unreadable"] > 0) == (1, True)
    assert json.loads(told["timeline"])["steps"] == [{"step": 2, "reward/mean": 1}]


KINDS = ("start", "placed", "failed", "fault", "recovered", "returning", "returned", "taken_over", "warning",
         "checkpoint", "checkpoint_failed", "joined", "left", "resume", "stopped_early", "ended")  # fmt: skip
FIELDS = ("time", "step", "from_step", "member", "role", "message", "error", "text", "cpus", "gpus", "silent_s",
          "seconds", "tokens_again", "steps_again", "accuracy", "goal", "reason", "rule")  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.text(max_size=4), st.just("\ud800"),
    st.just([1, "a"]), st.just({"a": None}), st.sampled_from(["0001-01-01T00:00:00+23:59", "9999-12-31T00:00:00Z"]),
)  # fmt: skip
EVENT = st.fixed_dictionaries({"kind": st.sampled_from(KINDS)}, optional=dict.fromkeys(FIELDS, ODD))
METRIC = st.dictionaries(
    st.sampled_from(["step", "reward/mean", "accuracy/heldout", "staleness/max", "dropped/late", "timing_s/step"]), ODD
)


@given(
    st.lists(EVENT, max_size=6),
    st.lists(METRIC, max_size=4),
    st.dictionaries(
        st.sampled_from(["name", "recipe", "algorithm", "trainer", "model", "max_staleness", "description"]), ODD
    ),
    ODD,
)
@settings(max_examples=amount(30))
def test_values_of_every_kind_are_answered_about(
    events: list[Any], metrics: list[Any], config: dict[str, Any], state: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "good", "start", metrics=steps(3))
        odd = make_run(Path(folder) / "odd", metrics=metrics)
        (odd / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        (odd / "state.json").write_text(json.dumps(state))
        (odd / "config.yaml").write_text(json.dumps(config))
        answers, words = Answers(Path(folder)), QueryParams({"run": "odd", "key": "reward/mean"})
        good = next(line for line in answers.table() if line["id"] == "good")
        assert good["step"] == 3
        for name in ("run", "compare", "series", "samples", "timeline", "state", "logs"):
            as_json(QUESTIONS[name](answers, words))


@pytest.mark.parametrize(
    "column",
    [pa.array([["a"]]), pa.array([[None]], pa.list_(pa.float64())), pa.array([3]), pa.array(["a"]), pa.array([None]),
     pa.array([[2**40, -1, None]]), pa.array([{"a": 1}]), pa.array([b"\xff"]),
     pa.array([[("a", 1)]], pa.map_("string", "int64")),
     pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))],
    ids=["texts", "nothings", "number", "text", "nothing", "no tokens", "struct", "bytes", "map", "no UTF-8"],
)  # fmt: skip
def test_samples_of_every_type_are_answered_about(page: TestClient, tmp_path: Path, column: pa.Array) -> None:
    run = make_run(tmp_path / "odd", "start", config="model: {path: ~nobody-of-this-name/x}\n")
    (run / "samples").mkdir()
    names = ("row_id", "group_id", "reward", "advantage", "finish_reason", "response_ids", "task", "response_text")
    for step, name in enumerate(names, 1):
        parquet.write_table(pa.table({name: column, "more": [1]}), run / "samples" / f"step_{step}.parquet")
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_text(WORDS)
    answers_about(page, "odd")
    for step in range(1, len(names) + 1):
        assert page.get("/api/sample", params={"run": "odd", "step": step, "place": 0}).status_code in (200, 404)
    assert page.get("/api/samples", params={"run": "odd", "text": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("question", "words", "status"),
    [
        ("samples", {"limit": "-1"}, 400),
        ("samples", {"offset": "-1"}, 400),
        ("samples", {"limit": "0"}, 200),
        ("samples", {"limit": 10**30}, 200),
        ("samples", {"offset": 10**30}, 200),
        *(("samples", {name: str(sign * 10**30)}, 200) for sign in (1, -1) for name in (
            "first_step", "last_step", "group", "least_tokens", "most_tokens", "least_reward", "most_reward")),
        ("samples", {"least_reward": "nan"}, 200),
        ("samples", {"text": "\ud800"}, 200),
        ("sample", {"step": "-1", "place": "0"}, 404),
        ("sample", {"step": 10**30, "place": "0"}, 404),
        ("sample", {"step": "1", "place": 10**30}, 404),
        ("sample", {"step": "1", "place": "-1"}, 404),
        ("sample", {"step": "1"}, 400),
        ("series", {"points": "-5"}, 200),
        ("series", {"points": 10**30}, 200),
        ("series", {"first": "nan", "last": "-inf"}, 200),
        ("timeline", {"first": 10**30}, 200),
        ("timeline", {"first": -(10**30), "last": 10**30}, 200),
        ("logs", {"member": "../../etc/passwd"}, 404),
        ("logs", {"member": "\0"}, 404),
    ],
)  # fmt: skip
def test_whatever_is_asked_an_answer_has_no_more_than_its_most(
    page: TestClient, tmp_path: Path, question: str, words: dict[str, Any], status: int
) -> None:
    write_samples(tmp_path / "good" / "samples", 1, [{"group": 0, "reward": 1.0}] * (2 * MANY))
    address = "&".join(f"{name}={value}" for name, value in words.items()).replace("\ud800", "%ED%A0%80")
    answer = page.get(f"/api/{question}?run=good&key=reward/mean&{address.replace(chr(0), '%00')}")
    assert answer.status_code == status, answer.text
    assert len(answer.json().get("rows", [])) <= MANY


def test_metrics_that_a_run_does_not_have_take_no_memory(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address has room for thousands of them, each of as many steps as the run has."""
    monkeypatch.setattr(Columns, "__getitem__", None)
    assert page.get("/api/series", params={"run": "good", "key": ["a", "b"]}).json() == {
        key: {"steps": [], "mean": []} for key in "ab"
    }
