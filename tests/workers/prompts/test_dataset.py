"""Datasets and every way in which a file can be wrong: the message has the file, the line and the key."""

import json
from pathlib import Path

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig
from penstock.conf.errors import ConfigError, DataError
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import RowNeeds
from penstock.workers.prompts.raw_rows import DataSelection, choose_files

GSM8K = Path(__file__).parents[3] / ".." / "shared" / "data" / "gsm8k" / "train.jsonl"
ROWS = [{"question": f"{n} + {n} = ?", "answer": str(2 * n), "level": n} for n in range(5)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(path, *, held_out=False, evaluation=None, **data):
    return open_dataset(DataConfig(path=path, **data), evaluation or EvaluationConfig(), held_out=held_out)


def test_rows_become_tasks_with_all_their_columns(tmp_path):
    dataset = opened(write(tmp_path / "a.jsonl", ROWS), prompt_template="Q: {prompt}\nA:")
    assert len(dataset) == 5
    task = dataset.row(3)
    assert (task.prompt, task.answer, task.response) == ("Q: 3 + 3 = ?\nA:", "6", "6")
    assert json.loads(task.to_json()) == {
        "question": "3 + 3 = ?", "answer": "6", "level": 3, "prompt": "Q: 3 + 3 = ?\nA:", "index": 3,
    }  # fmt: skip


def test_size_bounds_the_rows(tmp_path):
    assert len(opened(write(tmp_path / "a.jsonl", ROWS), size=2)) == 2


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"question": "q", "answer": "1"}\n\n{"question": "q"}\n')
    dataset = opened(str(tmp_path / "a.jsonl"))
    assert len(dataset) == 2
    needs = RowNeeds.of(DataConfig(), "prompts", answer=True)
    assert not needs.lacks(dataset.row(0))
    with pytest.raises(DataError, match=r"a\.jsonl line 4: no answer, which the reward asks for: no column 'answer'"):
        needs.lacks(dataset.row(1))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "q", "solution": "4"}, "4"),
        ({"question": "q", "solution": "4", "answer": "5"}, "5"),
        ({"question": "q", "reward_model": {"style": "rule", "ground_truth": "4"}}, "4"),
        ({"question": "q"}, None),
    ],
)
def test_the_answer_is_the_column_that_trls_or_verls_datasets_have(tmp_path, row, answer):
    assert opened(write(tmp_path / "a.jsonl", [row])).row(0).answer == answer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer"}', r"line 2: not valid JSON \(.* at character 27\)"),
        ("[1, 2]", "line 2: a JSON list, where an object"),
        ('{"text": "q", "answer": "1"}', r"line 2: no column 'question', which data\.columns\.prompt.*er, text"),
        ('{"question": 7, "answer": "1"}', r"line 2: column 'question' \(data\.columns\.prompt\) holds int 7"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "1"}\n' + line + "\n")
    dataset = opened(str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=message):
        dataset.row(1)


def test_bytes_that_are_no_utf8_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(DataError, match="line 1: not UTF-8"):
        opened(str(tmp_path / "a.jsonl")).row(0)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"data\.path=.*no rows"):
        opened(str(tmp_path / "a.jsonl"))


def test_a_missing_file_names_the_nearest_one(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"did you mean 'train\.jsonl'"):
        opened(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match="there is no folder"):
        opened(str(tmp_path / "nowhere" / "train.jsonl"))


def test_without_a_path_the_message_says_what_it_would_be():
    with pytest.raises(DataError, match=r"data\.path=null.*\.jsonl.*\.parquet.*openai/gsm8k"):
        opened(None)


def test_a_reward_that_needs_no_answer_gets_none(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q"}])
    assert opened(path, columns=ColumnsConfig(answer=None)).row(0).answer is None


def test_a_demonstration_has_its_own_column(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "4", "solution": "2+2=4"}])
    task = opened(path, columns=ColumnsConfig(response="solution")).row(0)
    assert (task.answer, task.response) == ("4", "2+2=4")
    assert "solution" not in json.loads(task.to_json())


def test_held_out_rows_come_from_the_evaluation_file_up_to_their_number(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    held = write(tmp_path / "b.jsonl", [{"question": "held", "answer": "1"}] * 9)
    evaluation = EvaluationConfig(every_steps=5, num_problems=4, path=held)
    dataset = opened(path, evaluation=evaluation, held_out=True)
    assert len(dataset) == 4
    assert dataset.row(0).prompt == "held"


def test_evaluation_without_held_out_rows_says_what_to_set(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    assert opened(path, held_out=True) is None
    with pytest.raises(DataError, match=r"evaluation\.every_steps=5.*set evaluation\.path"):
        opened(path, held_out=True, evaluation=EvaluationConfig(every_steps=5))


def test_procedural_problems_to_train_on_and_held_out_ones_are_disjoint():
    evaluation = EvaluationConfig(num_problems=50)
    options = {"source": "reasoning_gym", "options": {"max_terms": 2, "max_digits": 1}, "evaluation": evaluation}
    train, held = opened("chain_sum", size=300, **options), opened("chain_sum", held_out=True, **options)
    assert (len(train), len(held)) == (300, 50)
    assert not {train.row(i).prompt for i in range(300)} & {held.row(i).prompt for i in range(50)}
    assert train.row(7).response == train.row(7).answer


def test_parquet_folders_open_by_split(tmp_path):
    (tmp_path / "main").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:3]), tmp_path / "main" / "train-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[3:]), tmp_path / "main" / "train-00001-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "main" / "test-00000-of-00001.parquet")
    dataset = opened(str(tmp_path), source="huggingface", subset="main")
    assert [dataset.row(i).answer for i in range(len(dataset))] == ["0", "2", "4", "6", "8"]
    held = EvaluationConfig(every_steps=1, path="test")
    assert len(opened(str(tmp_path), source="huggingface", subset="main", evaluation=held, held_out=True)) == 1
    with pytest.raises(DataError, match=r"data\.split=tset.*did you mean 'test'"):
        opened(str(tmp_path), source="huggingface", subset="main", split="tset")


HUB = ["main/train/0000.parquet", "main/train/0001.parquet", "main/test/0000.parquet", "socratic/train/0000.parquet"]


def test_files_of_the_hub_are_chosen_by_subset_and_split():
    assert choose_files(HUB, DataSelection("openai/gsm8k", "main", "train")) == HUB[:2]
    for only in ("default/train/0000.parquet", "data/train-00000-of-00001.parquet"):
        assert choose_files([only], DataSelection("x/y", None, "train")) == [only]


@pytest.mark.parametrize(
    ("subset", "split", "message"),
    [
        (None, "train", r"data\.subset=null: .*main, socratic"),
        ("mian", "train", r"data\.subset=mian.*did you mean 'main'"),
        ("socratic", "test", r"data\.split=test.*Known: train"),
    ],
)
def test_a_wrong_subset_or_split_says_which_there_are(subset, split, message):
    with pytest.raises(DataError, match=message):
        choose_files(HUB, DataSelection("openai/gsm8k", subset, split))


def test_a_dataset_that_cannot_be_fetched_says_what_else_works(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.path=openai/gsm8k.*download its files"):
        opened("openai/gsm8k", source="huggingface", subset="main")


def test_a_hub_whose_host_is_not_found_is_told_the_same_way(monkeypatch):
    def listed(self, *words, **named):
        raise httpx2.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", listed)
    with pytest.raises(DataError, match=r"Name or service not known.*download its files"):
        opened("openai/gsm8k", source="huggingface", subset="main")


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"GSM8K is not at {GSM8K}")
def test_gsm8k_opens():
    dataset = opened(str(GSM8K))
    assert len(dataset) > 7000
    assert all("####" in dataset.row(index).answer for index in range(0, len(dataset), 100))


def test_a_teacher_writes_the_demonstrations(tmp_path):
    (tmp_path / "teacher.py").write_text("def teach(task):\n    return task['question'] + ' gives ' + task['answer']\n")
    dataset = opened(write(tmp_path / "a.jsonl", ROWS), teacher=f"{tmp_path}/teacher.py:teach")
    assert dataset.row(2).response == "2 + 2 = ? gives 4"
    with pytest.raises(ConfigError, match=r"data\.teacher=.*did you mean 'teach'"):
        opened(write(tmp_path / "a.jsonl", ROWS), teacher=f"{tmp_path}/teacher.py:teacher")


def test_a_second_teacher_writes_what_is_rejected(tmp_path):
    (tmp_path / "pairs.py").write_text("def right(task):\n    return 'yes'\ndef wrong(task):\n    return 'no'\n")
    teachers = {"teacher": f"{tmp_path}/pairs.py:right", "rejected_teacher": f"{tmp_path}/pairs.py:wrong"}
    task = opened(write(tmp_path / "a.jsonl", ROWS), **teachers).row(0)
    assert (task.response, task.rejected) == ("yes", "no")


def test_a_teacher_that_returns_no_text_is_named_with_the_row(tmp_path):
    (tmp_path / "silent.py").write_text("def teach(task):\n    return None\n")
    dataset = opened(write(tmp_path / "a.jsonl", ROWS), teacher=f"{tmp_path}/silent.py:teach")
    with pytest.raises(DataError, match=r"line 1: the teacher \(data\.teacher\) returned NoneType"):
        dataset.row(0)
