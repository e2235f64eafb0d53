"""Rows without an answer: named or left out where something needs one, and never text that was made of nothing."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl.rewards import accuracy_reward, think_format_reward

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig
from penstock.conf.errors import DataError
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import PromptDataset, RowNeeds
from penstock.workers.prompts.opening import check_prompts, encoder_of
from penstock.workers.prompts.source import PromptSource
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits
from penstock.workers.reward.reward_registry import needs_answer
from tests.workers.prompts.test_source import Characters, make_config

ROWS = [
    {"question": "1+1", "answer": 2.0, "said": "two"},
    {"question": "1+2", "answer": None, "said": None},
    {"question": "1+3", "answer": float("nan"), "said": "four"},
    {"question": "1+4", "answer": 5.0, "said": "five"},
]


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / str(request.param)
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file


def opened(path: Path, **data: Any) -> PromptDataset:
    dataset = open_dataset(DataConfig(path=str(path), **data), EvaluationConfig())
    assert dataset is not None
    return dataset


def source(path: Path, *, rows_are: str = "prompts", needs: bool = True, **data: Any) -> PromptSource:
    config = DataConfig(path=str(path), shuffle=False, **data)
    encoder = PromptEncoder(Characters(), config, TokenLimits(50, 50, "room"))
    return PromptSource(opened(path, **data), encoder, rows_are=rows_are, once=True, needs_answer=needs)


def test_null_and_nan_are_no_answer_and_no_text(path: Path) -> None:
    rows = [opened(path).row(index) for index in range(4)]
    assert [row.answer for row in rows] == [2.0, None, None, 5.0]
    assert [row.response for row in rows] == ["2.0", None, None, "5.0"]
    assert "NaN" not in "".join(row.to_json() for row in rows)


def test_a_row_without_an_answer_is_named_where_the_reward_needs_one(path: Path) -> None:
    with pytest.raises(DataError, match=r"(line 2|row 1): no answer.*data\.columns\.answer.*data\.no_answer=skip"):
        source(path).next_groups(4)
    assert len(source(path, needs=False).next_groups(4)) == 4


def test_such_rows_may_be_left_out_and_are_counted(path: Path) -> None:
    one = source(path, no_answer="skip")
    prompts = [json.loads(group["task"])["question"] for group in one.next_groups(4)]
    assert prompts == ["1+1", "1+4"]
    assert one.stats()["dropped/no_answer"] == 2
    again = source(path, no_answer="skip")
    again.go_to(2)
    assert (again.cursor, again.stats()["dropped/no_answer"]) == (one.start_after(2).cursor, 2)


def test_a_row_without_a_demonstration_is_named_or_left_out(path: Path) -> None:
    with pytest.raises(DataError, match=r"(line 2|row 1): no demonstration.*data\.columns\.answer"):
        source(path, rows_are="demonstrations", needs=False).next_groups(4)
    columns = ColumnsConfig(response="said")
    with pytest.raises(DataError, match=r"(line 2|row 1): no demonstration.*data\.columns\.response"):
        source(path, rows_are="demonstrations", needs=False, columns=columns).next_groups(4)
    one = source(path, rows_are="demonstrations", columns=columns, no_answer="skip")
    assert [group["response_text"] for group in one.next_groups(4)] == ["two", "four", "five"]
    pairs = source(path, rows_are="preferences", columns=ColumnsConfig(response="question", rejected="said"))
    with pytest.raises(DataError, match=r"(line 2|row 1): no rejected response.*data\.columns\.rejected"):
        pairs.next_groups(4)


def test_all_rows_that_are_read_are_counted_before_anything_starts(path: Path) -> None:
    def report(needs: bool, **data: Any) -> Any:
        config = make_config(path, **data)
        encoder = encoder_of(config, Characters(), None)
        return check_prompts(
            opened(path, **data), encoder, config, sample=1, needs=RowNeeds.of(config.data, "prompts", needs)
        )

    assert (report(False).unanswered, report(False).left_out) == (2, 0)
    assert (report(True, no_answer="skip").unanswered, report(True, no_answer="skip").left_out) == (2, 2)
    with pytest.raises(DataError, match=r"line 2|row 1"):
        report(True)
    assert report(False, columns=ColumnsConfig(answer=None)).unanswered == 0


def test_a_reward_that_needs_an_answer_asks_for_its_column(path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.columns\.answer=null"):
        source(path, columns=ColumnsConfig(answer=None)).next_groups(1)


def test_a_dataset_of_nothing_else_says_why(path: Path) -> None:
    config = make_config(path, no_answer="skip", columns=ColumnsConfig(answer=None))
    encoder, dataset = encoder_of(config, Characters(), None), opened(path, columns=config.data.columns)
    with pytest.raises(DataError, match=r"data\.no_answer=skip leaves out \d rows, and none is left of the 4"):
        PromptSource(dataset, encoder, needs_answer=True).next_groups(1)
    with pytest.raises(DataError, match=r"data\.no_answer=skip leave out all of the 4 rows: 4 have no answer"):
        check_prompts(dataset, encoder, config, needs=RowNeeds.of(config.data, "prompts", answer=True))


def test_problems_without_a_reference_have_none() -> None:
    class Problems:
        task = "riddle"

        def entry(self, index: int) -> dict[str, Any]:
            return {"question": "?", "answer": None, "metadata": {}}

        def extra(self, entry: dict[str, Any]) -> dict[str, Any]:
            return {"entry": entry}

    from penstock.workers.prompts.dataset import ProblemDataset

    row = ProblemDataset(Problems(), DataConfig()).row(0)  # type: ignore[arg-type]
    assert (row.answer, row.response) == (None, None)


def own(response: str, answer: str) -> float:
    return 1.0


def lenient(response: str, answer: str | None = None) -> float:
    return 1.0


def by_task(response: str, task: dict[str, Any]) -> float:
    return 1.0


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "options", "column", "expected"),
    [
        ("math_verify", {}, "answer", True), ("digits", {}, "answer", False), ("reasoning_gym", {}, "answer", False),
        ("label", {}, "answer", False), ("judge", {}, "answer", False), ("environment", {}, "answer", False),
        ("judge", {"rubric": "Is it {answer}?"}, "answer", True), (own, {}, "answer", True),
        (own, {"answer": "4"}, "answer", False), (lenient, {}, "answer", False), (by_task, {}, "answer", False),
        (of_verl, {}, "reward_model.ground_truth", True), (accuracy_reward, {}, "solution", True),
        (accuracy_reward, {}, "answer", True), (accuracy_reward, {}, None, False),
        (think_format_reward, {}, "answer", False),
        ("trl.rewards:accuracy_reward", {}, "solution", True),
        ("trl.rewards:get_soft_overlong_punishment", {"max_completion_len": 9}, "answer", False),
    ],
)  # fmt: skip
def test_a_reward_needs_what_it_asks_for(
    function: Any, options: dict[str, Any], column: str | None, expected: bool
) -> None:
    assert needs_answer(function, options, column) is expected
