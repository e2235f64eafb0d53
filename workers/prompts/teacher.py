"""Demonstrations from a function instead of from a column of the dataset: `data.teacher`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.conf.errors import DataError
from penstock.workers.prompts.task import PromptDataset, Task, is_cut

Teacher = Callable[[dict[str, Any]], str]
"""Function from a task (its JSON as a dict: prompt, answer, index, the row's own columns) to the demonstration."""


class TaughtDataset:
    """Rows of a dataset with other demonstrations, or other rejected responses."""

    def __init__(self, dataset: PromptDataset, teacher: Teacher, writes: str = "response") -> None:
        """`writes`: the task's field, "response" or "rejected"."""
        self._dataset, self._teacher, self._writes = dataset, teacher, writes
        self.is_cut = is_cut(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Task:
        task = self._dataset.row(index)
        response = self._teacher({**task.extra, "prompt": task.prompt, "answer": task.answer, "index": task.index})
        if not isinstance(response, str):
            raise DataError(
                f"{task.where}: the teacher (data.teacher) returned {type(response).__name__}, where text is due."
            )
        changed: dict[str, Any] = {self._writes: response}
        return replace(task, **changed)
