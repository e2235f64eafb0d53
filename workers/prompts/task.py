"""A row of a dataset, as source, rewards and teachers see it, and the interface of datasets with such rows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """A row: the question to the model, and the reward's data."""

    prompt: str
    """Text of the user, after `data.prompt_template`."""
    answer: Any
    """The reference answer as the dataset has it; None if `data.columns.answer=null`."""
    index: int
    """Row number in the dataset, from 0."""
    where: str
    """File and line, for messages."""
    response: str | None = None
    """The demonstration, or the chosen response of a pair, where there is one."""
    rejected: str | None = None
    """The rejected response of a pair."""
    messages: Sequence[Mapping[str, str]] = ()
    """The conversation that the response continues, where the dataset has one; `prompt` is its last text of the
    user."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's own columns, or what the environment's verifier needs."""
    problem: Any = None
    """Identity among problems, as JSON; None: the row's prompt, or its conversation after the system message."""

    def to_json(self, **more: Any) -> str:
        """The `task` column: the row's own columns with `prompt`, `answer`, `index` and `more`."""
        columns = {**self.extra, "prompt": self.prompt, "answer": self.answer, "index": self.index, **more}
        return json.dumps(columns, default=str)


class PromptDataset(Protocol):
    def __len__(self) -> int: ...

    def row(self, index: int) -> Task:
        """The row of a number. Raises `DataError` naming the row if it cannot be used."""


def is_cut(dataset: PromptDataset) -> bool:
    """Return whether a dataset's source makes more rows than are used, without a setting that says how many to use."""
    return bool(getattr(dataset, "is_cut", False))
