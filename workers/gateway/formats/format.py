"""What the gateway asks of a way to write conversations."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.workers.trajectory.turn import ToolCall, Turn

Message = Mapping[str, Any]
"""{role, content}, of the assistant also {reasoning_content, tool_calls}, of a tool also {tool_call_id, name}."""
Tools = Sequence[Mapping[str, Any]]
"""OpenAI's descriptions: {type: function, function: {name, description, parameters}}."""


@dataclass(frozen=True)
class Read:
    """What was sampled, as a message."""

    message: Message
    calls: Sequence[ToolCall] = ()
    problem: str = ""
    """Why a call could not be read, told to the model; empty if there was none."""


SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""What Mistral's templates take for the id of a call; others take anything."""


def call_id(turn: int, index: int) -> str:
    """A pure function of a call's place in its attempt: some templates write ids into prompts, which are the same when
    an attempt is played again. `turn`: its id; below 0 for one aside.

    >>> call_id(2, 0), call_id(-1, 3)
    ('c00002000', 'a00001003')
    """
    return f"{'c' if turn >= 0 else 'a'}{abs(turn):05d}{index:03d}"


class Format(Protocol):
    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The conversation, up to where the assistant is to speak."""

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """All tokens of `turn`, as they were sampled, and `new` messages after them, up to where the assistant is to
        speak. `before`: what the turn has answered. None: the conversation does not go on so, because the template
        writes what was before in another way now."""

    def read(self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = (), turn: int = 0) -> Read:
        """What was sampled, read. `prompt_ids`: after which, as it may have begun the thinking. `turn`: of whose id
        those of its calls are made."""
