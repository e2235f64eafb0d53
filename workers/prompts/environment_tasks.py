"""The tasks of an environment, as a dataset."""

import itertools
from collections.abc import Iterable

from penstock.conf.errors import DataError
from penstock.workers.environments import task as environments
from penstock.workers.prompts.task import Task

MOST_TASKS = 10_000
"""Of an environment that has no end of them, unless `data.size` says more."""


class EnvironmentTasks:
    """The first `size` tasks, or all there are."""

    def __init__(self, tasks: Iterable[environments.Task], size: int | None, name: str) -> None:
        """`name`: of the environment, for messages. Raises `DataError` if there are none."""
        self._tasks = list(itertools.islice(tasks, size or MOST_TASKS))
        self._name = name
        if not self._tasks:
            raise DataError(f"environment.name={name}: its tasks(seed) gives no task at all.")

    def __len__(self) -> int:
        return len(self._tasks)

    def row(self, index: int) -> Task:
        task = self._tasks[index]
        return Task("", None, index, f"{self._name} task {task.id}", extra=task.as_columns())
