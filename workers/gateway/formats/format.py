"""The interface of formats, by which the gateway writes conversations."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.workers.trajectory import ToolCall, Turn

Message = Mapping[str, Any]
"""A message: {role, content}, of the assistant also {reasoning_content, tool_calls}, of a tool also {tool_call_id,
name}."""
Tools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI describes them: {type: function, function: {name, description, parameters}}."""


@dataclass(frozen=True)
class Read:
    """The sampled tokens, read as a message."""

    message: Message
    calls: Sequence[ToolCall] = ()
    problem: str = ""
    """The reason why a call could not be read, told to the model; empty if there was none."""


SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Pattern of the ids of calls that Mistral's templates accept; others accept anything."""


def call_id(turn: int, index: int) -> str:
    """The id of a call, a pure function of its place in its attempt: some templates write ids into prompts, which must
    be the same when an attempt is repeated. `turn`: its id; below 0 for an untrained turn.

    >>> call_id(2, 0), call_id(-1, 3)
    ('c00002000', 'a00001003')
    """
    return f"{'c' if turn >= 0 else 'a'}{abs(turn):05d}{index:03d}"


class Format(Protocol):
    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of the conversation, up to where the assistant is to speak."""

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """All tokens of `turn`, as they were sampled, and `new` messages after them, up to where the assistant is to
        speak. `before`: the messages that the turn has answered. None: the conversation cannot go on so, because the
        template now writes the earlier messages in another way."""

    def read(self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = (), turn: int = 0) -> Read:
        """Read what was sampled. `prompt_ids`: the prompt before it, which may have begun the thinking. `turn`: its id,
        from which the ids of its calls are made."""
