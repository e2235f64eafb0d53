"""The test whether a conversation that is sent goes on with one that was answered. Pure.

Clients send all messages each time, as they have kept them. Two messages are the same if the model would read the same:
role, text, and calls of tools. Fields that harnesses add for themselves (ids, empty fields, annotations, cache marks,
how arguments are spaced) make no difference.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.workers.gateway.formats.format import Message, Tools

Key = bytes
"""The digest of a conversation: a session keeps two for each of its turns, and conversations are long."""


def history_key(messages: Sequence[Message], tools: Tools) -> Key:
    """The key of a conversation, equal for conversations that are the same."""
    said = [[_canonical(message) for message in messages], [_tool(tool) for tool in tools]]
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16).digest()


def text_of(content: Any) -> str:
    """The text of a message's content: text, or parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return str(content)


def _canonical(message: Message) -> list[Any]:
    calls = [_called(call) for call in message.get("tool_calls") or ()]
    return [message.get("role"), text_of(message.get("content")).strip(), calls]


def _called(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return [function.get("name"), arguments]
    return [function.get("name"), arguments]


def _tool(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function", {})
    return [function.get("name"), function.get("description"), function.get("parameters")]
