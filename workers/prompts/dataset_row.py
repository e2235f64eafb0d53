"""A row of a dataset, as the source of prompts, rewards and teachers see it; and the reading of columns that hold chat
messages instead of text, as TRL's and verl's datasets have them. Pure.

prompt   [{"role": "system", …}, {"role": "user", …}]          the conversation that is to be continued
prompt   [… , {"role": "assistant", …}]                        the same with its demonstration, the last message
response [{"role": "assistant", …}]                            what is to be learned, chosen or rejected
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.algorithms.graph.columns import OPENS_THINKING, TASK_MESSAGES
from penstock.conf.data import DataConfig
from penstock.conf.errors import DataError, suggest

ROLES = ("system", "user", "assistant", "tool")
NOT_READ = {"assistant": ("tool_calls", "function_call"), "tool": ("tool_call_id", "name")}
"""Keys of a message, beside its text, that a model should see and would not."""
Message = dict[str, str]


@dataclass(frozen=True)
class DatasetRow:
    """The question to the model, and the data for its reward."""

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
    prefix: str | None = None
    """The beginning of the answer, where a column called prompt ends with the assistant's words: what is sampled goes
    on with them."""
    pictures: Sequence[bytes] = ()
    """Pictures of the prompt, PNG or JPEG, one for each `<image>` in its text."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The row's own columns, or what the environment's verifier needs."""
    problem: Any = None
    """Identity among problems, as JSON; None: the row's prompt, or its conversation after the system message."""

    def to_json(self, **more: Any) -> str:
        """The `task` column: the row's own columns with `prompt`, `answer`, `index` and `more`."""
        columns = {**self.extra, "prompt": self.prompt, "answer": self.answer, "index": self.index, **more}
        return json.dumps(columns, default=str)

    def prompt_task(self, *, opens_thinking: bool = False) -> str:
        """The `task` column of a prompt, with its conversation. `opens_thinking`: the prompt has begun the thinking."""
        more = {OPENS_THINKING: True} if opens_thinking else {}
        return self.to_json(**more, **({TASK_MESSAGES: self.messages} if self.messages else {}))

    def with_hint(self, hint: str) -> "DatasetRow":
        """The row with another text of the user: `hint`, in which {prompt}, {answer} and {column} stand for the row's
        own. Raises `DataError` for a column that it lacks."""
        values = {**self.extra, "prompt": self.prompt, "answer": self.answer}

        def value(found: re.Match[str]) -> str:
            if found[1] not in values:
                raise DataError(f"{self.where}: algorithm.hint names {found[0]}{suggest(found[1], values)}")
            return str(values[found[1]])

        text = re.sub(r"\{(\w+)\}", value, hint)
        messages = [*self.messages[:-1], {**self.messages[-1], "content": text}] if self.messages else ()
        return replace(self, prompt=text, messages=messages)


@dataclass(frozen=True)
class RowNeeds:
    """What the use of a dataset's rows needs of each."""

    fields: Mapping[str, str]
    """Columns of `data.columns` by the field that needs them: answer, response, rejected."""
    columns: Mapping[str, str | None]
    """Names of these columns."""
    skips: bool
    """True if rows that lack something are left out."""

    @classmethod
    def of(cls, data: DataConfig, rows_are: str, answer: bool) -> "RowNeeds":
        """`rows_are`: as of a `PromptSource`. `answer`: the reward needs an answer."""
        fields = {"answer": "answer"} if answer and rows_are == "prompts" else {}
        if rows_are in ("demonstrations", "preferences"):
            fields = {"response": "answer" if data.columns.response is None else "response"}
        if rows_are == "preferences":
            fields["rejected"] = "rejected"
        return cls(fields, vars(data.columns), data.no_answer == "skip")

    def lacks(self, row: DatasetRow) -> bool:
        """Return whether a row is left out because it lacks something. Raises `DataError` where it is not to be."""
        lacking = next((field for field in self.fields if getattr(row, field) is None), None)
        if lacking is not None and not self.skips:
            raise self._error(row, lacking)
        return lacking is not None

    def _error(self, row: DatasetRow, lacking: str) -> DataError:
        whats = {"answer": "answer, which the reward asks for", "rejected": "rejected response"}
        what, key = whats.get(lacking, "demonstration"), self.fields[lacking]
        name = self.columns[key]
        if name is None:
            return DataError(f"{row.where}: no {what}: data.columns.{key}=null. Name its column.")
        if name.partition(".")[0] not in row.extra:
            hint = suggest(name, row.extra)
            return DataError(f"{row.where}: no {what}: no column {name!r}{hint} Set data.columns.{key}.")
        return DataError(
            f"{row.where}: no {what}: column {name!r} (data.columns.{key}) is null or NaN. Give the row one, or set "
            "data.no_answer=skip to leave such rows out."
        )


@dataclass(frozen=True)
class DataPart:
    """One source of a dataset's rows, as it is known by."""

    path: str
    rows: int
    raw: Callable[[int], Any]
    """Returns a row as its source has it."""
    num_bytes: int = 0
    """Bytes of its files, if all of their rows are used."""
    weight: float = 1.0
    """Share in the mixture."""


class PromptDataset(Protocol):
    """A dataset with such rows."""

    def __len__(self) -> int: ...

    def parts(self) -> Mapping[str, DataPart]:
        """The parts of a mixture by name; one without a name where it is none."""

    def row(self, index: int) -> DatasetRow:
        """The row of a number. Raises `DataError` naming the row if it cannot be used."""


def is_cut(dataset: PromptDataset) -> bool:
    """Return whether a dataset's source makes more rows than are used, without a setting that says how many to use."""
    return bool(getattr(dataset, "is_cut", False))


def is_conversation(value: Any) -> bool:
    """Return whether a value is meant as a conversation, whether or not it is in order. Parquet's lists come as
    arrays."""
    return not isinstance(value, str | Mapping) and isinstance(value, Sequence) and all(map(_is_message, value))


def messages_of(
    value: Sequence[Any], where: str, in_parts: Callable[[Sequence[Any], str], str] | None = None
) -> list[Message]:
    """The messages in their order, roles and texts alone. `in_parts`: makes text of a content that is a list of parts.
    Raises `DataError`, also for fields that name called tools: without them a conversation is another one."""
    if not value:
        raise DataError(f"{where} holds no message.")
    found = []
    for number, message in enumerate(value, 1):
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise DataError(f"{where}: message {number} is of role {role!r}. Known: {', '.join(ROLES)}.")
        if lost := next((key for key in NOT_READ.get(role, ()) if message.get(key)), None):
            raise DataError(
                f"{where}: message {number} has {lost}, which is not supported in data: the model would not see it. "
                "Write calls and what they return into the contents, or leave such rows out."
            )
        if in_parts is not None and isinstance(content, Sequence) and not isinstance(content, str):
            content = in_parts(content, f"{where}: message {number}")
        if not isinstance(content, str):
            raise DataError(f"{where}: the content of message {number} is {type(content).__name__}, where text is due.")
        found.append({"role": role, "content": content})
    return found


def split_response(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
    """The messages before the response, and the response where the last message is one."""
    if messages[-1]["role"] == "assistant":
        return list(messages[:-1]), messages[-1]["content"]
    return list(messages), None


def response_text(messages: Sequence[Message], where: str) -> str:
    """The response of a column that has a response alone, or at its end. Raises `DataError`."""
    _, response = split_response(messages)
    if response is None:
        raise DataError(f"{where}: its last message is of role {messages[-1]['role']!r}, where an assistant's is due.")
    return response


def with_template(messages: Sequence[Message], template: str) -> list[Message]:
    """Put `data.prompt_template` around the last text of the user.

    >>> with_template([{"role": "user", "content": "2 + 2"}], "{prompt} =")
    [{'role': 'user', 'content': '2 + 2 ='}]
    """
    found = [dict(message) for message in messages]
    for message in reversed(found):
        if message["role"] == "user":
            message["content"] = template.replace("{prompt}", message["content"])
            break
    return found


def last_text(messages: Sequence[Message]) -> str:
    """The prompt's text for rewards and teachers: the user's last text, or the last one of any role."""
    texts = [message["content"] for message in messages if message["role"] == "user"]
    return texts[-1] if texts else messages[-1]["content"]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()
