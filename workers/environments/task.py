"""One task of an environment: what a group's attempts are all at."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KEY = "environment_task"
"""Of a row's JSON, where it is a task."""
MESSAGES = "task_messages"
"""Of a row's JSON: the conversation that it begins with, beside the row's own columns."""


@dataclass(frozen=True)
class Task:
    """The same for all attempts of a group."""

    id: str
    seed: int
    """Of what is random in the environment; the policy's sampling has its own."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON: what the environment needs to know, or the row of a dataset."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation that a row of a dataset begins with: `data.system_prompt`, what was said before, the question.
    Empty for a task of the environment's own."""
    problem: Any = None
    """What tells it from other tasks, as JSON; None: its data, or its seed where it has none. Where these say it of one
    setting of the environment's options alone, those belong in here, too. No step trains on a problem that evaluation
    measures."""

    @property
    def identity(self) -> Any:
        if self.problem is not None:
            return self.problem
        return dict(self.data) or self.seed

    def as_columns(self) -> Mapping[str, Any]:
        """In the place of a dataset's columns."""
        return {KEY: {"id": self.id, "seed": self.seed, "data": dict(self.data)}}

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Of the `task` column: an environment's own, or a row of a dataset, whose number is its id and seed."""
        columns = json.loads(text)
        if KEY not in columns:
            messages = columns.pop(MESSAGES, ())
            return cls(str(columns["index"]), int(columns["index"]), columns, messages)
        value = columns[KEY]
        return cls(str(value["id"]), int(value["seed"]), value["data"])
