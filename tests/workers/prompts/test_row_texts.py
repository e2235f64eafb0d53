"""Rows with what is no text, and rows that Arrow has filled with fields of others."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig
from penstock.conf.errors import DataError
from penstock.workers.agents.environment import Task
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import PromptDataset
from penstock.workers.prompts.opening import EnvironmentTasks

GOOD: dict[str, Any] = {"question": "1 + 1? 😀 \\u0000 \\ud800", "answer": "2", "more": {"tests": [["a", {"b": "c"}]]}}
BAD: list[Any] = [
    pytest.param({**GOOD, "question": "a\0b"}, r"column 'question' holds a NUL \(U\+0000\)", id="prompt"),
    pytest.param({**GOOD, "answer": "\ud83d"}, r"'answer' holds half of a surrogate pair \(U\+D83D\)", id="answer"),
    pytest.param({**GOOD, "more": {"tests": [["a", {"b": "\0"}]]}}, r"column 'more' holds a NUL", id="deep"),
    pytest.param({**GOOD, "more": {"a\udc00": [["a"]]}}, r"'more' holds half of a .*U\+DC00", id="key"),
    pytest.param({**GOOD, "b\udc00": 1}, r"column 'b\\udc00' holds half of a", id="name"),
]


def opened(path: Any, **data: Any) -> PromptDataset:
    dataset = open_dataset(DataConfig(path=str(path), **data), EvaluationConfig())
    assert dataset is not None
    return dataset


@pytest.mark.parametrize(("row", "told"), BAD)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_of_json_with_no_text_is_named_when_the_file_is_opened(
    tmp_path: Path, name: str, row: dict[str, Any], told: str
) -> None:
    rows = [GOOD, GOOD, row]
    lines = "\n".join(map(json.dumps, rows)) if name == "rows.jsonl" else json.dumps(rows)
    (tmp_path / name).write_text(lines)
    where = "line 3" if name == "rows.jsonl" else "row 2"
    with pytest.raises(DataError, match=f"{name} {where}: .*{told}"):
        opened(tmp_path / name)


def test_texts_that_only_look_like_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD, ensure_ascii=False))
    assert [opened(tmp_path / "rows.jsonl").row(index).prompt for index in range(2)] == [GOOD["question"]] * 2
    row = {**GOOD, "more": ["\\u0000"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert opened(tmp_path / "rows.parquet").row(0).extra == row


def test_bytes_that_are_no_utf8_are_named_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(json.dumps(GOOD).encode() * 1 + b'\n{"question": "caf\xe9"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        opened(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), "a\0"), (pa.large_string(), "a\0"), (pa.list_(pa.string()), ["x", "\0"]),
        (pa.struct({"a": pa.list_(pa.struct({"b": pa.string()}))}), {"a": [{"b": "\0"}]}),
        (pa.map_(pa.string(), pa.string()), [("a\0", "b")]), (pa.dictionary(pa.int32(), pa.string()), "\0"),
    ],
)  # fmt: skip
def test_a_row_of_a_table_with_a_nul_is_named(tmp_path: Path, kind: pa.DataType, value: Any) -> None:
    table = pa.table({"question": ["a", "b"], "answer": ["1", "2"], "more": pa.array([None, value], kind)})
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="row 1: column 'more' holds a NUL"):
        opened(tmp_path / "rows.arrow")


def test_a_row_of_a_table_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    texts = pa.array([b"fine", b"\xed\xa0\x80"]).view(pa.string())
    pq.write_table(pa.table({"question": texts, "answer": ["1", "2"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="row 1: a text is not UTF-8"):
        opened(tmp_path / "rows.parquet")


def test_rows_and_responses_that_functions_make_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "def rows(seed):\n    return [{'question': 'a', 'answer': '1'}, {'question': 'b', 'answer': '\\0'}]\n"
        "def teach(task):\n    return '\\ud800'\n"
    )
    with pytest.raises(DataError, match=r"made\.py:rows row 1: column 'answer' holds a NUL"):
        opened(f"{tmp_path}/made.py:rows")
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(DataError, match=r"line 1: what the teacher \(data\.teacher\) returned.*half of a surrogate"):
        opened(tmp_path / "rows.jsonl", teacher=f"{tmp_path}/made.py:teach").row(0)


def test_an_environments_tasks_are_looked_at() -> None:
    tasks = [Task("a", 1, {"said": "x"}), Task("b", 2, {"said": ["\0"]})]
    with pytest.raises(DataError, match="game task 'b': column 'said' holds a NUL"):
        EnvironmentTasks(tasks, None, "game")


def test_fields_that_arrow_fills_in_are_left_out(tmp_path: Path) -> None:
    def tool(name: str, **parameters: Any) -> dict[str, Any]:
        about = {"type": "object", "properties": parameters, "required": list(parameters)}
        return {"type": "function", "function": {"name": name, "parameters": about}}

    rows = [
        {"prompt": "a", "answer": "1", "tools": [tool("weather", city={"type": "string", "enum": ["Rome"]})],
         "reward_model": {"ground_truth": "1", "style": "rule"}},
        {"prompt": "b", "answer": None, "tools": [tool("add", a={"type": "integer"}, b={"type": "integer"})],
         "reward_model": {"style": "model"}},
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    dataset = opened(tmp_path / "rows.parquet")
    assert [dataset.row(index).extra for index in range(2)] == rows
    fields = ColumnsConfig("prompt", "reward_model.ground_truth")
    dataset = opened(tmp_path / "rows.parquet", columns=fields)
    assert [dataset.row(index).answer for index in range(2)] == ["1", None]


def test_a_null_that_json_says_stays(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**GOOD, "more": {"said": None}}))
    assert opened(tmp_path / "rows.jsonl").row(0).extra["more"] == {"said": None}
