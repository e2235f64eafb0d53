"""What `data.path` names is read by its name and bytes: in files, folders, patterns and URLs."""

import csv
import functools
import gzip
import http.server
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
import zstandard

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig, PartConfig
from penstock.conf.errors import DataError
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.prompts.data_names import names_files, names_split
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import PromptDataset

ROWS = [{"question": f"{n} + {n} = ?\nSay it.", "answer": f"00{2 * n}"} for n in range(5)]


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_list(rows: list[dict[str, Any]]) -> bytes:
    return b"\xef\xbb\xbf\n" + json.dumps(rows, indent=2).encode()


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue().encode()


def in_memory(write: Callable[[Any], object]) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    return in_memory(lambda sink: pq.write_table(pa.Table.from_pylist(rows), sink))


def as_arrow(rows: list[dict[str, Any]], make: Any = ipc.new_stream) -> bytes:
    table = pa.Table.from_pylist(rows)

    def write(sink: Any) -> None:
        with make(sink, table.schema) as writer:
            writer.write_table(table)

    return in_memory(write)


FORMS: dict[str, bytes] = {
    "rows.jsonl": as_lines(ROWS),
    "rows.json": as_list(ROWS),
    "lines.json": as_lines(ROWS),
    "rows.jsonl.gz": gzip.compress(as_lines(ROWS[:2])) + gzip.compress(as_lines(ROWS[2:])),
    "rows.jsonl.zst": zstandard.compress(as_lines(ROWS)),
    "rows.json.gz": gzip.compress(as_list(ROWS)),
    "rows.csv": as_csv(ROWS),
    "rows.csv.gz": gzip.compress(as_csv(ROWS)),
    "rows.tsv": as_csv(ROWS, "\t"),
    "rows.parquet": as_parquet(ROWS),
    "rows.arrow": as_arrow(ROWS),
    "file.arrow": as_arrow(ROWS, ipc.new_file),
    "rows.feather": in_memory(lambda sink: feather.write_feather(pa.Table.from_pylist(ROWS), sink)),
    "parquet that is called.jsonl": as_parquet(ROWS),
    "compressed lines that are called.jsonl": gzip.compress(as_lines(ROWS)),
    "lines without an ending": as_lines(ROWS),
    "lines that are called.csv": as_lines(ROWS),
}


def opened(
    path: Any, *, held_out: bool = False, evaluation: EvaluationConfig | None = None, **data: Any
) -> PromptDataset:
    dataset = open_dataset(DataConfig(path=str(path), **data), evaluation or EvaluationConfig(), held_out=held_out)
    assert dataset is not None
    return dataset


def pairs(dataset: PromptDataset) -> list[tuple[str, Any]]:
    return [(row.prompt, row.answer) for row in map(dataset.row, range(len(dataset)))]


EXPECTED = [(row["question"], row["answer"]) for row in ROWS]


@pytest.mark.parametrize("source", ["auto", "jsonl", "huggingface"])
@pytest.mark.parametrize("name", FORMS)
def test_a_file_is_what_its_name_and_bytes_say_whatever_the_source(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / name).write_bytes(FORMS[name])
    assert pairs(opened(tmp_path / name, source=source)) == EXPECTED


@pytest.mark.parametrize("name", FORMS)
def test_a_url_is_read_as_a_file_of_its_name(name: str) -> None:
    system = fsspec.filesystem("memory")
    system.pipe_file(f"/bucket/data/{name}", FORMS[name])
    try:
        assert pairs(opened(f"memory://bucket/data/{name}")) == EXPECTED
        assert pairs(opened("memory://bucket/data")) == EXPECTED if "." in name else True
        assert pairs(opened("memory://bucket/d*/*")) == EXPECTED
    finally:
        system.rm("/bucket", recursive=True)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None: ...


def test_files_of_a_web_server_are_read_whatever_its_query(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(FORMS["rows.csv"])
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        assert pairs(opened(f"{place}/rows.csv?download=true")) == EXPECTED
        with pytest.raises(DataError, match=r"none\.csv: there is no such file or folder, or its host"):
            opened(f"{place}/none.csv")
        server.shutdown()


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "parquet", "arrow", "json"])
def test_a_folder_and_a_glob_are_all_of_their_files_in_order(tmp_path: Path, ending: str) -> None:
    write = {
        "jsonl": as_lines, "jsonl.gz": lambda rows: gzip.compress(as_lines(rows)), "csv": as_csv,
        "parquet": as_parquet, "arrow": as_arrow, "json": as_list,
    }[ending]  # fmt: skip
    (tmp_path / "deep").mkdir()
    (tmp_path / f"part-0000.{ending}").write_bytes(write(ROWS[:3]))
    (tmp_path / f"part-0001.{ending}").write_bytes(write(ROWS[3:]))
    (tmp_path / "README.md").write_text("About them.")
    (tmp_path / ".hidden.jsonl").write_text("nothing")
    assert pairs(opened(tmp_path)) == EXPECTED
    assert pairs(opened(tmp_path / f"part-*.{ending}")) == EXPECTED
    assert pairs(opened(tmp_path / f"**/part-*1.{ending}")) == EXPECTED[3:]


def test_a_folder_with_splits_gives_the_one_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(as_lines(ROWS[:3]))
    (tmp_path / "test.jsonl").write_bytes(as_lines(ROWS[3:]))
    held = EvaluationConfig(every_steps=1, path="test")
    assert pairs(opened(tmp_path)) == EXPECTED[:3]
    assert pairs(opened(tmp_path, evaluation=held, held_out=True)) == EXPECTED[3:]
    assert pairs(opened(tmp_path, split="test")) == EXPECTED[3:]
    with pytest.raises(DataError, match=r"data\.split=tran: .*did you mean 'train'"):
        opened(tmp_path, split="tran")
    with pytest.raises(DataError, match=r"evaluation\.path=tset: .*did you mean 'test'"):
        opened(tmp_path, evaluation=EvaluationConfig(every_steps=1, path="tset"), held_out=True)


def test_what_datasets_saves_to_disk_opens(tmp_path: Path) -> None:
    """The layout of `DatasetDict.save_to_disk`."""
    for split, rows in (("train", ROWS[:3]), ("test", ROWS[3:])):
        (tmp_path / split).mkdir()
        (tmp_path / split / "data-00000-of-00001.arrow").write_bytes(as_arrow(rows))
        (tmp_path / split / "state.json").write_text('{"_split": "train"}')
        (tmp_path / split / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert pairs(opened(tmp_path)) == EXPECTED[:3]
    assert pairs(opened(tmp_path / "test")) == EXPECTED[3:]


def test_a_folder_of_several_formats_is_refused_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(as_csv(ROWS))
    (tmp_path / "b.parquet").write_bytes(as_parquet(ROWS))
    with pytest.raises(DataError, match=r"files of several formats: csv, parquet.*\*\.csv"):
        opened(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file with rows"):
        opened(tmp_path / "empty")


@pytest.mark.parametrize(
    "named", ["train.jsonl", "data/train.parquet", "data/parts/train", "./train", "~/nowhere", "d*/x"]
)
def test_a_missing_path_is_told_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    def asked(*words: Any, **named: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", asked)
    monkeypatch.chdir(tmp_path)
    for source in ("auto", "jsonl", "huggingface"):
        with pytest.raises(DataError, match=rf"data\.path={named.replace('*', '.')}: there is no"):
            opened(named, source=source)
    for source in ("auto", "jsonl"):
        with pytest.raises(DataError, match=r"data\.path=chain_sum: there is no.*reasoning_gym"):
            opened("chain_sum", source=source)
    with pytest.raises(DataError, match=r"data\.path=memory://nowhere/x\.csv: there is no"):
        opened("memory://nowhere/x.csv")
    with pytest.raises(DataError, match=r"data\.path=nosuch://x\.csv: no file system.*nosuch"):
        opened("nosuch://x.csv")


def test_a_dataset_of_the_hub_needs_its_name_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "0000.parquet")
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_, **__: ["main/train/0000.parquet"])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "0000.parquet"))
    assert pairs(opened("openai/gsm8k")) == EXPECTED


def test_a_column_called_prompt_is_the_prompt_where_there_is_no_question(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(as_csv([{"prompt": "007", "answer": "1"}]))
    assert pairs(opened(tmp_path / "rows.csv")) == [("007", "1")]
    (tmp_path / "trl.csv").write_bytes(as_csv([{"prompt": "7", "solution": "007"}]))
    assert pairs(opened(tmp_path / "trl.csv")) == [("7", "007")]
    (tmp_path / "both.csv").write_bytes(as_csv([{"prompt": "no", "question": "yes", "answer": "1"}]))
    assert pairs(opened(tmp_path / "both.csv")) == [("yes", "1")]
    (tmp_path / "none.csv").write_bytes(as_csv([{"text": "a", "answer": "1"}]))
    with pytest.raises(DataError, match=r"no column 'question', which data\.columns\.prompt names"):
        opened(tmp_path / "none.csv").row(0)
    with pytest.raises(DataError, match=r"no column 'asked', which data\.columns\.prompt names"):
        opened(tmp_path / "rows.csv", columns=ColumnsConfig("asked")).row(0)


def test_held_out_rows_and_parts_of_mixtures_are_read_the_same_way(tmp_path: Path) -> None:
    for name in ("rows.csv", "rows.parquet", "rows.jsonl.zst"):
        (tmp_path / name).write_bytes(FORMS[name])
    held = EvaluationConfig(every_steps=1, path=f"{tmp_path}/rows.par*", num_problems=2)
    assert pairs(opened(tmp_path / "rows.csv", evaluation=held, held_out=True)) == EXPECTED[:2]
    parts = {"a": PartConfig(path=f"{tmp_path}/rows.csv"), "b": PartConfig(path=f"{tmp_path}/rows.jsonl.zst")}
    mixed = open_dataset(DataConfig(mixture=parts), EvaluationConfig())
    assert mixed is not None
    assert sorted(pairs(mixed)) == sorted(EXPECTED * 2)


def test_held_out_files_may_be_another_folder_than_the_data(tmp_path: Path) -> None:
    for folder, name, rows in (("a", "train", ROWS[:3]), ("b", "test", ROWS[3:]), ("b", "train", ROWS[:1])):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.jsonl").write_bytes(as_lines(rows))
    held = EvaluationConfig(every_steps=1, path=f"{tmp_path}/b")
    assert pairs(opened(tmp_path / "a", evaluation=held, held_out=True)) == EXPECTED[3:]


def test_a_file_for_a_recipe_of_another_source_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").write_bytes(FORMS["rows.parquet"])
    for recipe in ("gsm8k", "arithmetic", "code"):
        config = load_config([f"recipe={recipe}", "data.path=rows.parquet"])
        assert (config.data.path, config.evaluation.every_steps) == (f"{tmp_path}/rows.parquet", 0)
        assert len(opened(config.data.path, source=config.data.source)) == 5
    assert load_config(["recipe=sft", "data.path=rows.parquet"]).data.teacher is None
    (tmp_path / "mine.py").write_text("")
    config = load_config(["recipe=sft", "data.path=rows.parquet", "data.teacher=mine.py:teach"])
    assert config.data.teacher == f"{tmp_path}/mine.py:teach"
    config = load_config(["recipe=gsm8k", "data.path=rows.par*", "evaluation.path=*.parquet"])
    assert (config.data.path, config.evaluation.path) == (f"{tmp_path}/rows.par*", f"{tmp_path}/*.parquet")
    assert config.evaluation.every_steps > 0


def test_a_recipes_own_names_stay_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "basic_arithmetic").mkdir()
    (tmp_path / "test").mkdir()
    config = load_config(["recipe=arithmetic", "data.path=basic_arithmetic"])
    assert (config.data.source, config.data.path) == ("reasoning_gym", "basic_arithmetic")
    config = load_config(["recipe=gsm8k"])
    assert (config.data.path, config.evaluation.path) == ("openai/gsm8k", "test")


def test_relative_paths_of_held_out_sets_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_bytes(FORMS["rows.csv"])
    config = load_config(["data.path=a.csv", "evaluation.sets={hard: {path: b.csv}}"])
    assert config.evaluation.sets["hard"].path == f"{tmp_path}/b.csv"


def test_names_of_files_are_told_from_names_of_datasets_and_splits(tmp_path: Path) -> None:
    assert all(map(names_files, ["a.jsonl", "x/a.csv.gz", "s3://bucket/a", "*.parquet", "/a/b", "a/b/c", "./a"]))
    assert not any(map(names_files, ["openai/gsm8k", "gsm8k", "org/data-v1.0"]))
    assert names_split("test", "openai/gsm8k")
    assert names_split("test", str(tmp_path))
    (tmp_path / "rows").write_text("")
    assert not names_split("test", str(tmp_path / "rows"))
    assert not any(names_split(name, str(tmp_path)) for name in ("test.jsonl", "a/b", "*", "s3://b/test"))


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.parquet", b"PAR1 and no more", r"a\.parquet: reading it as parquet failed"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.parquet", b"question,answer\n", r"a\.parquet: its name says parquet, and its bytes do not"),
        ("a.jsonl.gz", gzip.compress(as_lines(ROWS), mtime=0)[:-20], r"a\.jsonl\.gz: reading it as gzip failed"),
        ("a.csv", b'question,answer\n"a,1\n', r"a\.csv: .*csv"),
        ("a.json", b'[{"question": "q"}, 7]', r"a\.json row 1: a JSON int, where an object"),
        ("a.json", b'[{"question": "q"}', r"a\.json: not valid JSON"),
        ("a.json", b"[]", "no rows"),
        ("a.csv", b"question,answer\n", "no rows|without a row"),
        ("a.jsonl", b'{"question": "q", "answer": ' + b"1" * 5000 + b"}", r"line 1: not valid JSON"),
        ("a.jsonl", b'{"question": ' + b"[" * 100_000, r"line 1: not valid JSON"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, name: str, data: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=told):
        pairs(opened(tmp_path / name))
