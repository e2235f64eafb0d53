"""Datasets of prompts: rows by number, from any source; several of them as one, or with demonstrations of a teacher.

They are opened at the start of a run, by evaluation for the held-out problems, and by `penstock validate`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig
from penstock.conf.errors import DataError, suggest
from penstock.workers.problems import Problems
from penstock.workers.prompts.data_names import names_split
from penstock.workers.prompts.dataset_row import (
    DataPart,
    DatasetRow,
    Message,
    PromptDataset,
    is_conversation,
    is_cut,
    last_text,
    messages_of,
    response_text,
    split_response,
    with_template,
)
from penstock.workers.prompts.raw_rows import (
    ArrowRows,
    DataSelection,
    PythonRows,
    RawRows,
    check_texts,
    open_table,
    without_none,
)
from penstock.workers.prompts.row_pictures import RowPictures
from penstock.workers.user_code import InlineValue, find_function

DEFAULT_PROBLEMS = 100_000
MOST_ROWS = 10_000_000
"""Largest number of rows of a mixture: with very different weights, small parts would be repeated very often."""
Teacher = Callable[[dict[str, Any]], str]
"""Function from a task (its JSON as a dict: prompt, answer, index, the row's own columns) to the demonstration."""
_FILES = "files with rows (.jsonl, .json, .csv, .parquet, .arrow), their folder, a pattern or a URL"
_PATH_MEANS = {
    "auto": f"{_FILES}; a dataset of the hub such as openai/gsm8k; or a function that makes rows, file.py:function",
    "jsonl": _FILES,
    "python": "a function that makes rows, file.py:function",
    "huggingface": "a dataset id such as openai/gsm8k, or a folder of files",
    "reasoning_gym": "the name of a task such as chain_sum",
}


class TableDataset:
    """Rows with named columns, from a file or the hub."""

    def __init__(self, rows: RawRows, config: DataConfig, size: int | None) -> None:
        self.rows, self.config = rows, config
        self.size = min(len(rows), size or len(rows))
        self.is_cut = isinstance(rows, PythonRows) and rows.is_cut

    def __len__(self) -> int:
        return self.size

    def parts(self) -> Mapping[str, DataPart]:
        num_bytes = self.rows.num_bytes if self.size == len(self.rows) else 0
        return {"": DataPart(str(self.config.path), self.size, self.rows.row, num_bytes)}

    def row(self, index: int) -> DatasetRow:
        row, where = self.rows.row(index), self.rows.where(index)
        columns = _with_usual(self.config.columns, row)
        seen = RowPictures(where, self.rows.folder, self._pictures(row, where), self.config.private_urls)
        messages, demonstration = self._conversation(row, columns.prompt, where, seen)
        prompt = ""
        if not messages:
            prompt = self.config.prompt_template.replace("{prompt}", self._text(row, columns.prompt, "prompt", where))
        messages, prompt, pictures = _with_pictures(messages, prompt, seen)
        answer = None if columns.answer is None else known(self._value(row, columns.answer, "answer", where))
        response = answer if demonstration is None else demonstration
        if columns.response is not None:
            response = self._response(row, columns.response, "response", where)
        rejected = None if columns.rejected is None else self._response(row, columns.rejected, "rejected", where)
        left_out = (columns.response, columns.rejected, *((columns.pictures, columns.prompt) if pictures else ()))
        extra = {key: known(value) for key, value in row.items() if key not in left_out}
        if self.rows.is_filled:
            extra = {key: without_none(value) for key, value in extra.items()}
        response = None if response is None else str(response)
        prefix = demonstration if columns.prompt.rpartition(".")[2] == "prompt" else None
        return DatasetRow(prompt, answer, index, where, response, rejected, messages, prefix, pictures, extra)

    def _pictures(self, row: dict[str, Any], where: str) -> Sequence[Any] | None:
        """Values of the column of pictures; None if none is named."""
        if self.config.columns.pictures is None:
            return None
        value = self._value(row, self.config.columns.pictures, "pictures", where)
        return () if value is None else value if isinstance(value, list | tuple) else (value,)

    def _conversation(
        self, row: dict[str, Any], column: str, where: str, seen: RowPictures
    ) -> tuple[list[Message], str | None]:
        """The conversation of a prompt column with messages, and their demonstration if they end with one; empty for a
        column with text."""
        value = self._value(row, column, "prompt", where)
        if not is_conversation(value):
            return [], None
        messages, response = split_response(messages_of(value, f"{where}: column {column!r}", seen.content))
        if not messages:
            raise DataError(f"{where}: column {column!r} (data.columns.prompt) begins with a response to nothing.")
        return with_template(messages, self.config.prompt_template), response

    def _value(self, row: dict[str, Any], column: str, role: str, where: str) -> Any:
        """The value of a column. `column`: its name, or that of a field in one: `reward_model.ground_truth`."""
        head, _, field = column.partition(".")
        if column not in row and field and isinstance(row.get(head), dict):
            return self._value(row[head], field, role, where)
        if column not in row:
            raise DataError(
                f"{where}: no column {column!r}, which data.columns.{role} names{suggest(column, row)} Set "
                f"data.columns.{role}."
            )
        return row[column]

    def _response(self, row: dict[str, Any], column: str, role: str, where: str) -> str | None:
        """The text of a column; None where the row has none."""
        is_known = known(self._value(row, column, role, where)) is not None
        return self._text(row, column, role, where) if is_known else None

    def _text(self, row: dict[str, Any], column: str, role: str, where: str) -> str:
        value = self._value(row, column, role, where)
        if is_conversation(value):
            place = f"{where}: column {column!r} (data.columns.{role})"
            return response_text(messages_of(value, place), place)
        if not isinstance(value, str):
            raise DataError(
                f"{where}: column {column!r} (data.columns.{role}) holds {type(value).__name__} {value!r:.60}, where "
                "text is due."
            )
        return value


def known(value: Any) -> Any:
    """A value of a row, or None for a NaN, which stands for nothing where tables have no null."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_usual(columns: ColumnsConfig, row: Mapping[str, Any]) -> ColumnsConfig:
    """The names of the columns. Where the row has none of a default name, it is the one that TRL's or verl's datasets
    have; a row without any answer has none."""
    prompt, answer = columns.prompt, columns.answer
    if prompt == ColumnsConfig.prompt and prompt not in row and "prompt" in row:
        prompt = "prompt"
    if answer == ColumnsConfig.answer and answer not in row:
        verls = "reward_model.ground_truth" if "ground_truth" in (row.get("reward_model") or ()) else None
        answer = "solution" if "solution" in row else verls
    return (
        columns
        if (prompt, answer) == (columns.prompt, columns.answer)
        else replace(columns, prompt=prompt, answer=answer)
    )


def _with_pictures(
    messages: list[Message], prompt: str, seen: RowPictures
) -> tuple[list[Message], str, Sequence[bytes]]:
    """The conversation and its last text, or the prompt where there is none, with marks of their pictures, and
    these."""
    if not messages:
        (prompt,), pictures = seen.placed([prompt])
        return messages, prompt, pictures
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
    texts, pictures = seen.placed([message["content"] for message in messages], first)
    messages = [message | {"content": text} for message, text in zip(messages, texts, strict=True)]
    return messages, last_text(messages), pictures


class ProblemDataset:
    """Problems of a procedural environment."""

    def __init__(self, problems: Problems, config: DataConfig) -> None:
        self.problems, self.config = problems, config

    def __len__(self) -> int:
        return len(self.problems)

    def parts(self) -> Mapping[str, DataPart]:
        made = self.problems
        return {"": DataPart(made.task, len(made), lambda index: [made.task, made.options, made.seed])}

    def row(self, index: int) -> DatasetRow:
        entry = self.problems.entry(index)
        prompt = self.config.prompt_template.replace("{prompt}", str(entry["question"]))
        answer = None if entry["answer"] is None else str(entry["answer"])
        where = f"{self.problems.task} problem {index}"
        return DatasetRow(prompt, answer, index, where, answer, extra=self.problems.extra(entry))


class TeacherDataset:
    """Rows of a dataset with other demonstrations, or other rejected responses, from a function (`data.teacher`)
    instead of a column."""

    def __init__(self, dataset: PromptDataset, teacher: Teacher, writes: str = "response") -> None:
        """`writes`: the row's field, "response" or "rejected"."""
        self._dataset, self._teacher, self._writes = dataset, teacher, writes
        self.is_cut = is_cut(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def parts(self) -> Mapping[str, DataPart]:
        return self._dataset.parts()

    def row(self, index: int) -> DatasetRow:
        row = self._dataset.row(index)
        response = self._teacher({**row.extra, "prompt": row.prompt, "answer": row.answer, "index": row.index})
        if not isinstance(response, str):
            raise DataError(
                f"{row.where}: the teacher (data.teacher) returned {type(response).__name__}, where text is due."
            )
        check_texts(response, f"{row.where}: what the teacher (data.teacher) returned")
        changed: dict[str, Any] = {self._writes: response}
        return replace(row, **changed)


class Mixture:
    """Several datasets as one, each with its share of the prompts. Any stretch of its rows has about its share of each
    part; every part is gone through whole, in its own order, and small ones again and again. The row's `data_source`
    has the part's name, as verl's rows have it."""

    def __init__(self, parts: Mapping[str, PromptDataset], weights: Mapping[str, float]) -> None:
        """Mix the parts. Raises `DataError` for a mixture that would be too long."""
        self._names = list(parts)
        self._parts = [parts[name] for name in self._names]
        self.is_cut = any(is_cut(part) for part in self._parts)
        total = sum(weights.values())
        self._shares = shares = [weights[name] / total for name in self._names]
        longest = max(len(part) / share for part, share in zip(self._parts, shares, strict=True))
        if longest > MOST_ROWS:
            raise DataError(
                f"data.mixture: until each part was gone through, {longest:,.0f} rows would be drawn. Bring the "
                "weights closer together, or limit the largest part: size."
            )
        self._places = interleaved(shares, round(longest))

    def __len__(self) -> int:
        return len(self._places)

    def parts(self) -> Mapping[str, DataPart]:
        given = zip(self._names, self._parts, self._shares, strict=True)
        return {name: replace(part.parts()[""], weight=share) for name, part, share in given}

    def row(self, index: int) -> DatasetRow:
        number, turn = self._places[index]
        part = self._parts[number]
        row = part.row(turn % len(part))
        return replace(row, index=index, extra={"data_source": self._names[number], **row.extra})


def interleaved(shares: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Choose a part for each of so many rows, and which of its turns it is: always the part that lags most behind its
    share.

    >>> interleaved([0.75, 0.25], 4)
    [(0, 0), (0, 1), (1, 0), (0, 2)]
    """
    given = [0] * len(shares)
    places = []
    for row in range(1, count + 1):
        number = max(range(len(shares)), key=lambda part: (shares[part] * row - given[part], -part))
        places.append((number, given[number]))
        given[number] += 1
    return places


def open_dataset(data: DataConfig, evaluation: EvaluationConfig, *, held_out: bool = False) -> PromptDataset | None:
    """Open the rows to train on, or the held-out ones (at most `evaluation.num_problems`).

    None: there is no held-out set and none is asked for. Raises `DataError` or `ConfigError` naming the key.
    """
    dataset = _open(data, evaluation, held_out)
    if dataset is None or held_out:
        return dataset
    for field_name, key in (("response", "teacher"), ("rejected", "rejected_teacher")):
        if teacher := getattr(data, key):
            dataset = TeacherDataset(dataset, find_function(teacher, f"data.{key}"), field_name)
    return dataset


def _open(data: DataConfig, evaluation: EvaluationConfig, held_out: bool) -> PromptDataset | None:
    if data.mixture and not held_out:
        parts = {name: _open(data.part(name), evaluation, held_out=False) for name in data.mixture}
        weights = {name: part.weight for name, part in data.mixture.items()}
        return Mixture({name: part for name, part in parts.items() if part is not None}, weights)
    if data.mixture:
        data = data.part(next(iter(data.mixture)))
    if not data.path:
        raise DataError(f"data.path=null: data.source={data.source} needs {_PATH_MEANS[data.source]}.")
    path = evaluation.path if held_out else data.path
    if isinstance(path, InlineValue):
        size = evaluation.num_problems if held_out else data.size
        is_table = isinstance(path.value, pa.Table)
        return TableDataset(ArrowRows(path, [path.value]) if is_table else PythonRows(path, 0, size), data, size)
    if data.kind == "reasoning_gym":
        return ProblemDataset(_problems(data, evaluation, held_out), data)
    if data.kind == "python":
        spec, key = (evaluation.path or data.path, "evaluation.path") if held_out else (data.path, "data.path")
        seed, size = (evaluation.seed, evaluation.num_problems) if held_out else (data.seed, data.size)
        return TableDataset(PythonRows(spec, seed, size, key), data, size)
    if held_out and evaluation.path is None:
        if evaluation.every_steps == 0:
            return None
        raise DataError(
            f"evaluation.every_steps={evaluation.every_steps}, but there are no held-out problems: set evaluation.path "
            "to a second file, or to the name of another split, e.g. test; or evaluation.every_steps=0."
        )
    size = evaluation.num_problems if held_out else data.size
    named = data.columns
    texts = {named.prompt, "prompt", "solution", *filter(None, (named.answer, named.response, named.rejected))}
    wanted = _wanted(data, data.path, evaluation.path if held_out else None)
    return TableDataset(open_table(wanted, data.source, texts), data, size)


def _wanted(data: DataConfig, path: str, held_out: str | None) -> DataSelection:
    """What is wanted of the data to train on. `held_out`: what evaluation wants, another split or other files."""
    if held_out is None:
        return DataSelection(path, data.subset, data.split)
    if names_split(held_out, path):
        return DataSelection(path, data.subset, held_out, split_key="evaluation.path")
    return DataSelection(held_out, key="evaluation.path", split_key="evaluation.path")


def _problems(data: DataConfig, evaluation: EvaluationConfig, held_out: bool) -> Problems:
    """Make problems. Held-out ones are made from their own seed, and left out of those to train on, even in a run that
    does not evaluate: the next run, which starts from its model, may."""
    assert data.path is not None
    measured = Problems(
        data.path, evaluation.options or data.options, seed=evaluation.seed, size=evaluation.num_problems
    )
    if held_out:
        return measured
    size, exclude = data.size or DEFAULT_PROBLEMS, measured.questions()
    for name in evaluation.sets:
        exclude |= _problems(*evaluation.of_set(name, data), held_out=True).questions()
    return Problems(data.path, data.options, seed=data.seed, size=size, exclude=exclude)
