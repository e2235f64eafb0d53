"""The tasks of an environment, as a dataset."""

from collections.abc import Iterable

from penstock.conf.errors import DataError
from penstock.workers.environments import environment as environments
from penstock.workers.prompts.python_rows import first_of
from penstock.workers.prompts.task import Task


class EnvironmentTasks:
    """The first `size` tasks, or all of a list, or the first ones of an endless generator."""

    def __init__(self, tasks: Iterable[environments.Task], size: int | None, name: str) -> None:
        """`name`: of the environment, for messages. Raises `DataError` if there are no tasks."""
        self._tasks, self.is_cut = first_of(tasks, size)
        self._name = name
        if not self._tasks:
            raise DataError(f"environment.name={name}: its tasks(seed) gives no task at all.")

    def __len__(self) -> int:
        return len(self._tasks)

    def row(self, index: int) -> Task:
        task = self._tasks[index]
        where = f"{self._name} task {task.id}"
        return Task("", None, index, where, extra=task.as_columns(), problem=[task.identity])
