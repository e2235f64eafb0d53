"""A task of an environment, which all attempts of a group work on."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.algorithms.graph.columns import ENVIRONMENT_TASK, TASK_MESSAGES

KEY = ENVIRONMENT_TASK
"""Key of a row's JSON, where the row is a task."""
MESSAGES = TASK_MESSAGES
"""Key of a row's JSON for the conversation that it begins with, beside the row's own columns."""


@dataclass(frozen=True)
class Task:
    """A task, the same for all attempts of a group."""

    id: str
    seed: int
    """Seed of what is random in the environment; the policy's sampling has its own."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data as JSON: what the environment needs to know, or the row of a dataset."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation that a row of a dataset begins with: `data.system_prompt`, what was said before, the question. A
    content with pictures is a list of parts, `{type: text, text}` and `{type: image, image: bytes}`. Empty for a task
    of the environment's own."""
    problem: Any = None
    """Identity among tasks, as JSON; None: its data, or its seed where it has none. Where these identify it only for
    one setting of the environment's options, those belong in here, too. No step trains on a problem that evaluation
    measures."""

    @property
    def identity(self) -> Any:
        if self.problem is not None:
            return self.problem
        return dict(self.data) or self.seed

    def as_columns(self) -> Mapping[str, Any]:
        """The task in the place of a dataset's columns."""
        return {KEY: {"id": self.id, "seed": self.seed, "data": dict(self.data)}}

    @classmethod
    def from_json(cls, text: str, pictures: Sequence[Any] = ()) -> "Task":
        """Read the `task` column: an environment's own task, or a row of a dataset, whose number is its id and seed.
        `pictures`: bytes of the row's pictures, in the order of the parts that stand for them."""
        columns = json.loads(text)
        if KEY not in columns:
            left = iter(pictures)
            messages = [_with_pictures(message, left) for message in columns.pop(MESSAGES, ())]
            return cls(str(columns["index"]), int(columns["index"]), columns, messages)
        value = columns[KEY]
        return cls(str(value["id"]), int(value["seed"]), value["data"])


def _with_pictures(message: Mapping[str, Any], pictures: Iterator[Any]) -> Mapping[str, Any]:
    if isinstance(content := message["content"], str):
        return message
    parts = [{"type": "image", "image": bytes(next(pictures))} if part["type"] == "image" else part for part in content]
    return {**message, "content": parts}
