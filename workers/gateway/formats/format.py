"""What the gateway asks of a way to write conversations."""

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


class Format(Protocol):
    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The conversation, up to where the assistant is to speak."""

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """All tokens of `turn`, as they were sampled, and `new` messages after them, up to where the assistant is to
        speak. `before`: what the turn has answered. None: the conversation does not go on so, because the template
        writes what was before in another way now."""

    def read(self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = ()) -> Read:
        """What was sampled, read. `prompt_ids`: after which, as it may have begun the thinking."""
