"""Demonstrations from a function instead of from a column of the dataset: `data.teacher`. Wrapped around a dataset by
`dataset.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from penstock.conf.errors import DataError

Teacher = Callable[[dict[str, Any]], str]
"""From a task (its JSON as a dict: prompt, answer, index, the row's own columns) to the demonstration."""


class Rows(Protocol):
    def __len__(self) -> int: ...

    def row(self, index: int) -> Any: ...


class TaughtDataset:
    """The same rows with other demonstrations, or other rejected responses."""

    def __init__(self, dataset: Rows, teacher: Teacher, writes: str = "response") -> None:
        """`writes`: the task's field, "response" or "rejected"."""
        self._dataset, self._teacher, self._writes = dataset, teacher, writes

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Any:
        task = self._dataset.row(index)
        response = self._teacher({**task.extra, "prompt": task.prompt, "answer": task.answer, "index": task.index})
        if not isinstance(response, str):
            raise DataError(
                f"{task.where}: the teacher (data.teacher) returned {type(response).__name__}, where text is due."
            )
        return replace(task, **{self._writes: response})
